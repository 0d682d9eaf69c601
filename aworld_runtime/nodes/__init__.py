"""Nodes: what turns an event into events, what runs them, and what keeps their logs.

an episode   owner: appends to its log. claim: its place in the queue, and what a server lost. reception: which mail
             is let in. context: what a handler may touch. tool_calls, pause
programs     node: nodes and how they are loaded. serial: a line of agents. environment: tasks and scores
processes    worker, with connections to models. tool_worker. presence: who is on the bus
logs         archiver: bus to store, with records of episodes and runs. janitor: what is over goes, what was lost
             comes back. logs: reads them wherever they are. verify: compares bus and store. marker: where the feed
             ends. run_log, lost: what a requester writes
all of them  room: a bus that is full
"""
