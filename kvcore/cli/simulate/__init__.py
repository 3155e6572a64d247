"""Replays a trace through the real index, manager, policies and planner. Only time is simulated.

command   the options of `kvcore simulate`
sweep     the scenarios of a run, and their outcomes as a table, JSON and a plot
run       one scenario over one trace
media     the manager's transport: transfers take as long as the rates say
points    resume points: where the engine has them, and which are kept
trace     requests in the format that Mooncake publishes, one per line
agents    a made-up trace: conversations of agents
"""
