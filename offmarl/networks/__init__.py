"""Neural networks: encoders, torsos, mixers, critics, and policies."""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.networks.action_values import (
        ActionValue as ActionValue,
        CriticInput as CriticInput,
        Critics as Critics,
        as_vectors as as_vectors,
        make_critics as make_critics,
    )
    from offmarl.networks.alternating import (
        JointActionModel as JointActionModel,
        OwnCritic as OwnCritic,
        given_actions as given_actions,
        of_agent as of_agent,
        view_of_agent as view_of_agent,
    )
    from offmarl.networks.autoregressive import (
        AgentSequence as AgentSequence,
        Decoded as Decoded,
        init_agent_sequence as init_agent_sequence,
        make_agent_sequence as make_agent_sequence,
        make_sequence_policy as make_sequence_policy,
    )
    from offmarl.networks.encoders import (
        ActionEncoder as ActionEncoder,
        CentralInput as CentralInput,
        Encoder as Encoder,
        blank_view as blank_view,
        central as central,
        critic_encoder as critic_encoder,
        observation_encoder as observation_encoder,
        state_encoder as state_encoder,
        view_encoder as view_encoder,
    )
    from offmarl.networks.flows import (
        JointFlow as JointFlow,
        chosen_action as chosen_action,
        init_one_step as init_one_step,
        integrate as integrate,
        make_one_step_policy as make_one_step_policy,
        one_step_network as one_step_network,
    )
    from offmarl.networks.linear import (
        SMALL as SMALL,
        AgentId as AgentId,
        InputLayer as InputLayer,
        Inputs as Inputs,
    )
    from offmarl.networks.mixers import (
        LinearMixer as LinearMixer,
        MixedParams as MixedParams,
        MixedValues as MixedValues,
        Mixer as Mixer,
        MixerWeights as MixerWeights,
        init_mixer as init_mixer,
        make_linear_mixer as make_linear_mixer,
        make_mixer as make_mixer,
        mix as mix,
        mix_counterfactuals as mix_counterfactuals,
        mix_each as mix_each,
        mix_linearly as mix_linearly,
        mixing_coefficients as mixing_coefficients,
        mixing_weights as mixing_weights,
    )
    from offmarl.networks.policies import (
        AgentNetwork as AgentNetwork,
        Head as Head,
        NoisyParams as NoisyParams,
        PolicyConfig as PolicyConfig,
        QParams as QParams,
        agent_head as agent_head,
        agent_network as agent_network,
        differentiable_action as differentiable_action,
        head_policy as head_policy,
        init_network as init_network,
        init_policy as init_policy,
        make_network as make_network,
        make_policy as make_policy,
        squash as squash,
        stochastic_head as stochastic_head,
    )
    from offmarl.networks.torsos import (
        Activation as Activation,
        FeedForward as FeedForward,
        Moments as Moments,
        Recurrent as Recurrent,
        Unshared as Unshared,
        unroll_batch as unroll_batch,
        unroll_part as unroll_part,
    )
    from offmarl.networks.transformer import (
        DecisionTransformer as DecisionTransformer,
        Trajectory as Trajectory,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
