"""The drone-swarm suite: five tasks for any number of drones on one engine.

`dynamics` moves drones, `neighbours` finds the nearest drones and points, `observations` builds
views, and `options` holds the options of all tasks. `env` combines these into an environment
without rules. Each task adds its rules in a module of its own.
"""
