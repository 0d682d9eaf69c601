"""The archive: what keeps the logs, on the bus while they go on, in the store after that.

archiver     bus to store, with records of episodes and runs
janitor      what is over goes, what was lost comes back
logs         reads them wherever they are
verify       compares bus and store
marker       where the feed ends
requests     what a run asked for, followed to its end
run_log      a run's log, as its writer keeps it
lost         a log of which a server lost events: what is known is put back, and the log says so
"""
