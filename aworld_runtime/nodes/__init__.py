"""Nodes: what turns an event into events, and what runs them.

an episode   owner: appends to its log. claim: its place in the queue, and what a server lost. reception: which mail
             is let in. context: what a handler may touch. tool_calls, pause
programs     node: nodes and how they are loaded. serial: a line of agents. environment: tasks and scores
processes    worker, with connections to models. tool_worker. deliveries: those that failed
"""
