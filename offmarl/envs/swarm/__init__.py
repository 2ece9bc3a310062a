"""The drone-swarm suite: five tasks for any number of drones on one engine.

`dynamics` moves drones, `neighbours` finds what is near them,
`observations` builds what agents observe, and `options` holds the options of all tasks. `env` joins
these into an environment without rules; each task has a module with its rules.
"""
