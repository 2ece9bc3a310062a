"""What programs that learn alike share: arguments, optimisers, losses and updates."""
