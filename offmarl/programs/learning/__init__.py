"""Arguments, optimisers, losses and updates that programs share."""
