"""Neural networks: encoders, torsos, mixers, critics, and policies."""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.networks.action_values import ActionValue as ActionValue
    from offmarl.networks.action_values import CriticInput as CriticInput
    from offmarl.networks.action_values import Critics as Critics
    from offmarl.networks.action_values import as_vectors as as_vectors
    from offmarl.networks.action_values import make_critics as make_critics
    from offmarl.networks.alternating import JointActionModel as JointActionModel
    from offmarl.networks.alternating import OwnCritic as OwnCritic
    from offmarl.networks.alternating import given_actions as given_actions
    from offmarl.networks.alternating import of_agent as of_agent
    from offmarl.networks.alternating import view_of_agent as view_of_agent
    from offmarl.networks.autoregressive import AgentSequence as AgentSequence
    from offmarl.networks.autoregressive import Decoded as Decoded
    from offmarl.networks.autoregressive import SequenceMemory as SequenceMemory
    from offmarl.networks.autoregressive import init_agent_sequence as init_agent_sequence
    from offmarl.networks.autoregressive import make_agent_sequence as make_agent_sequence
    from offmarl.networks.autoregressive import make_sequence_policy as make_sequence_policy
    from offmarl.networks.deterministic import NoisyParams as NoisyParams
    from offmarl.networks.deterministic import differentiable_action as differentiable_action
    from offmarl.networks.deterministic import squash as squash
    from offmarl.networks.encoders import Encoder as Encoder
    from offmarl.networks.encoders import ViewEncoder as ViewEncoder
    from offmarl.networks.encoders import blank_view as blank_view
    from offmarl.networks.encoders import central as central
    from offmarl.networks.encoders import observation_encoder as observation_encoder
    from offmarl.networks.encoders import state_encoder as state_encoder
    from offmarl.networks.encoders import unshared_critic_encoder as unshared_critic_encoder
    from offmarl.networks.encoders import view_encoder as view_encoder
    from offmarl.networks.flows import JointFlow as JointFlow
    from offmarl.networks.flows import chosen_action as chosen_action
    from offmarl.networks.flows import init_one_step as init_one_step
    from offmarl.networks.flows import integrate as integrate
    from offmarl.networks.flows import make_one_step_policy as make_one_step_policy
    from offmarl.networks.flows import one_step_network as one_step_network
    from offmarl.networks.inputs import AgentId as AgentId
    from offmarl.networks.inputs import InputLayer as InputLayer
    from offmarl.networks.inputs import Inputs as Inputs
    from offmarl.networks.mixers import LinearMixer as LinearMixer
    from offmarl.networks.mixers import LinearWeights as LinearWeights
    from offmarl.networks.mixers import MixedParams as MixedParams
    from offmarl.networks.mixers import MixedValues as MixedValues
    from offmarl.networks.mixers import Mixer as Mixer
    from offmarl.networks.mixers import MixerKind as MixerKind
    from offmarl.networks.mixers import MixerWeights as MixerWeights
    from offmarl.networks.mixers import PooledMixer as PooledMixer
    from offmarl.networks.mixers import init_mixer as init_mixer
    from offmarl.networks.mixers import linear_weights as linear_weights
    from offmarl.networks.mixers import make_linear_mixer as make_linear_mixer
    from offmarl.networks.mixers import make_mixer as make_mixer
    from offmarl.networks.mixers import mix as mix
    from offmarl.networks.mixers import mix_counterfactuals as mix_counterfactuals
    from offmarl.networks.mixers import mix_each as mix_each
    from offmarl.networks.mixers import mix_linearly as mix_linearly
    from offmarl.networks.mixers import mixing_coefficients as mixing_coefficients
    from offmarl.networks.mixers import mixing_weights as mixing_weights
    from offmarl.networks.policies import AgentNetwork as AgentNetwork
    from offmarl.networks.policies import Head as Head
    from offmarl.networks.policies import PolicyConfig as PolicyConfig
    from offmarl.networks.policies import QParams as QParams
    from offmarl.networks.policies import agent_head as agent_head
    from offmarl.networks.policies import agent_network as agent_network
    from offmarl.networks.policies import init_network as init_network
    from offmarl.networks.policies import init_policy as init_policy
    from offmarl.networks.policies import make_network as make_network
    from offmarl.networks.policies import make_policy as make_policy
    from offmarl.networks.policies import stochastic_head as stochastic_head
    from offmarl.networks.pooling import AttentionPool as AttentionPool
    from offmarl.networks.pooling import CriticKind as CriticKind
    from offmarl.networks.pooling import PooledEncoder as PooledEncoder
    from offmarl.networks.pooling import critic_encoder as critic_encoder
    from offmarl.networks.retention import GatedLayer as GatedLayer
    from offmarl.networks.retention import Retention as Retention
    from offmarl.networks.retention import retain as retain
    from offmarl.networks.torsos import Activation as Activation
    from offmarl.networks.torsos import FeedForward as FeedForward
    from offmarl.networks.torsos import Moments as Moments
    from offmarl.networks.torsos import Recurrent as Recurrent
    from offmarl.networks.torsos import unroll_batch as unroll_batch
    from offmarl.networks.transformer import CausalTransformer as CausalTransformer
    from offmarl.networks.transformer import DecisionTransformer as DecisionTransformer
    from offmarl.networks.transformer import Trajectory as Trajectory
    from offmarl.networks.unshared import Unshared as Unshared
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
