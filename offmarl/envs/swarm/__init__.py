"""The drone-swarm suite: tasks for any number of agents, on one engine.

`bodies` moves drones, `neighbours` and `sensing` tell what is around them; `options`, `senses` and
`task` make an environment of that, but for the rules of the five tasks, each of which has a module.
"""
