"""The drone-swarm suite: tasks for any number of agents, on one engine."""
