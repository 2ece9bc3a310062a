"""The drone-swarm suite: six tasks for any number of drones on one engine.

`dynamics` and `quadrotor` move drones, `collisions` lets them push each other, and `randomisation`
draws what varies between episodes. `neighbours` finds the nearest drones and points and lines of
sight, `observations` builds views, and `options` holds the options of all tasks. `env` combines
these into an environment without rules. Each task adds its rules in a module of its own.
"""
