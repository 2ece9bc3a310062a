"""Imitation of the data's actions."""

from jaxtyping import Array, Bool, Float, Int

from offmarl import categorical


def cross_entropy(
    logits: Float[Array, "T N A"],
    action: Int[Array, "T N"],
    legal_actions: Bool[Array, "T N A"],
) -> Float[Array, "T N"]:
    """-log π(a | o) of the data's actions, π being normalised over legal actions."""
    return -categorical.log_prob(categorical.mask_illegal(logits, legal_actions), action)
