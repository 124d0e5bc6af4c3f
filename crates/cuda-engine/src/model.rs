//! A model's numbers as the kernels take them, and which models there are no kernels for.

use engine::EngineLimits;
use engine::for_devices::rope_speeds;
use model_files::arch::{self, Activation, EmbeddingScale};
use model_files::config::{ModelConfig, Rope};
use thiserror::Error;

use crate::kernels::calls::{DecodeAttention, GateFunction, RopePairs};
use crate::kernels::{AttentionShape, SPLIT_TOKENS};
use crate::options::Mode;

/// Rows of a matrix are read 16 bytes at a time: eight bf16.
const MULTIPLE: usize = 8;
/// Angles are exact below 2^20 (`kernels/rope_write.cu`), and the fastest pair turns by 1 for each position.
const CONTEXT_MAX: usize = 1 << 20;
/// The largest batch of a decode step that is launched as a graph.
pub(crate) const GRAPH_ROWS_MAX: u32 = 64;
/// Pairs of a row and a split of decode attention that are computed at once. With more, the rows come in groups. An 8B model
/// with heads of 128 needs 67 MB for them.
const PARTS_MIN: u32 = 4_096;

/// A model that the GPU engine has no kernels for, or settings that they cannot have. The heads are in
/// [`UnsupportedShape`](crate::kernels::UnsupportedShape).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum UnsupportedModel {
    #[error(
        "the GPU engine needs {what} that is a multiple of 8, the model has {value}; run this model with `--device cpu`"
    )]
    NotMultiple { what: &'static str, value: usize },
    #[error(
        "the GPU engine computes positions up to {most}, the model has {context_length}; run this model with `--device cpu`",
        most = CONTEXT_MAX
    )]
    Context { context_length: usize },
    #[error("the GPU engine needs KV blocks of 16, 32, 64, 128 or 256 tokens, not {block_tokens}; change --block-size")]
    BlockTokens { block_tokens: u32 },
}

/// The model, as far as a step must know it.
#[derive(Clone, Debug)]
pub(crate) struct ModelPlan {
    pub shape: AttentionShape,
    pub layers: Vec<LayerPlan>,
    /// Lengths of rows.
    pub hidden: u32,
    pub query: u32,
    pub kv: u32,
    pub ffn: u32,
    pub vocab: u32,
    pub kv_heads: u32,
    pub gate: GateFunction,
    pub embedding_scale: f32,
    pub epsilon: f32,
    pub attention_scale: f32,
    pub attention_softcap: Option<f32>,
    pub logit_softcap: Option<f32>,
    /// That of most layers, then that of layers with a window, where it is another one.
    pub ropes: Vec<RopePlan>,
    pub context: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerPlan {
    pub window: Option<u32>,
    /// The index in `ropes`.
    pub rope: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct RopePlan {
    /// The angle of each pair at position 1.
    pub speeds: Vec<f64>,
    pub magnitude: f32,
    pub kind: RopePairs,
}

impl ModelPlan {
    /// The numbers are those of a checked file.
    pub(crate) fn new(config: &ModelConfig, shape: AttentionShape) -> Result<Self, UnsupportedModel> {
        for (what, value) in [
            ("a hidden size", config.hidden_size),
            ("a feed-forward size", config.ffn_size),
        ] {
            if !value.is_multiple_of(MULTIPLE) {
                return Err(UnsupportedModel::NotMultiple { what, value });
            }
        }
        let context_length = config.context_length;
        if context_length > CONTEXT_MAX {
            return Err(UnsupportedModel::Context { context_length });
        }
        let has_other_rope = config.window_rope.is_some();
        let layers = (0..config.layer_count).map(|layer| {
            let window = config.window_of(layer);
            LayerPlan {
                rope: usize::from(window.is_some() && has_other_rope),
                // A window that is never full hides nothing, and the kernels add it to positions.
                window: window
                    .filter(|tokens| *tokens < context_length)
                    .map(|tokens| tokens as u32),
            }
        });
        let ropes = [Some(&config.rope), config.window_rope.as_ref()];
        Ok(Self {
            shape,
            layers: layers.collect(),
            hidden: config.hidden_size as u32,
            query: config.query_size() as u32,
            kv: config.kv_size() as u32,
            ffn: config.ffn_size as u32,
            vocab: config.vocab_size as u32,
            kv_heads: config.kv_head_count as u32,
            gate: match config.architecture.activation {
                Activation::Silu => GateFunction::Silu,
                Activation::GeluTanh => GateFunction::GeluTanh,
            },
            embedding_scale: match config.architecture.embedding_scale {
                EmbeddingScale::One => 1.0,
                EmbeddingScale::SqrtHidden => (config.hidden_size as f32).sqrt(),
            },
            epsilon: config.rms_epsilon,
            attention_scale: config.attention_scale,
            attention_softcap: config.attention_softcap,
            logit_softcap: config.logit_softcap,
            ropes: ropes.into_iter().flatten().map(RopePlan::new).collect(),
            context: context_length as u32,
        })
    }

    /// Values of a row of queries, keys and values.
    pub(crate) fn qkv(&self) -> u32 {
        self.query + 2 * self.kv
    }
}

impl RopePlan {
    fn new(rope: &Rope) -> Self {
        let (speeds, magnitude) = rope_speeds(rope);
        Self {
            speeds,
            magnitude: magnitude as f32,
            kind: match rope.pairs {
                arch::RopePairs::Neighbours => RopePairs::Neighbours,
                arch::RopePairs::Halves => RopePairs::Halves,
            },
        }
    }

    pub(crate) fn pairs(&self) -> u32 {
        self.speeds.len() as u32
    }
}

/// What a step has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capacity {
    /// Those of padding included.
    pub rows: u32,
    pub sequences: u32,
    /// Entries of a sequence's table of blocks.
    pub stride: u32,
    /// Pairs of a row and a split of decode attention. None where that kernel is not used.
    pub parts: u32,
}

impl Capacity {
    /// # Errors
    /// A block size that the kernels do not have.
    pub(crate) fn of(
        limits: EngineLimits,
        (context, block_tokens): (u32, u32),
        mode: Mode,
    ) -> Result<Self, UnsupportedModel> {
        if !block_tokens.is_power_of_two() || !(16..=SPLIT_TOKENS).contains(&block_tokens) {
            return Err(UnsupportedModel::BlockTokens { block_tokens });
        }
        let splits = DecodeAttention::splits_for(context.max(1)).next_power_of_two();
        Ok(Self {
            rows: limits.max_batch_tokens.max(GRAPH_ROWS_MAX),
            sequences: limits.max_sequences.max(GRAPH_ROWS_MAX),
            stride: stride_of(splits, block_tokens),
            parts: match mode {
                Mode::Fast => splits.max(PARTS_MIN),
                Mode::Invariant => 0,
            },
        })
    }
}

/// Blocks of a sequence that has so many splits. A split has whole blocks.
pub(crate) fn stride_of(splits: u32, block_tokens: u32) -> u32 {
    splits * (SPLIT_TOKENS / block_tokens)
}

#[cfg(test)]
pub(crate) mod tests {
    use model_files::arch::{Architecture, WindowLayers};
    use model_files::config::{RopeScaling, Window};

    use super::*;

    fn config() -> ModelConfig {
        let architecture = Architecture::named("llama").expect("it is supported");
        ModelConfig {
            architecture,
            layer_count: 2,
            hidden_size: 576,
            head_count: 9,
            kv_head_count: 3,
            head_dim: 64,
            ffn_size: 1_536,
            vocab_size: 49_152,
            rope: Rope {
                pairs: architecture.rope,
                base: 10_000.0,
                dims: 64,
                scaling: RopeScaling::None,
            },
            window_rope: None,
            window: None,
            attention_scale: 0.125,
            attention_softcap: None,
            logit_softcap: None,
            rms_epsilon: 1e-5,
            context_length: 8_192,
            tied_embeddings: true,
        }
    }

    /// The sizes of SmolLM2-135M, with two layers.
    pub(crate) fn plan() -> ModelPlan {
        plan_of(&config()).expect("it has kernels")
    }

    fn plan_of(config: &ModelConfig) -> Result<ModelPlan, UnsupportedModel> {
        ModelPlan::new(config, AttentionShape::new(64, 9, 3).expect("it has kernels"))
    }

    #[test]
    fn a_model_becomes_what_the_kernels_take() {
        let plan = plan();
        assert_eq!((plan.qkv(), plan.query, plan.kv), (960, 576, 192));
        assert_eq!((plan.ropes.len(), plan.ropes[0].pairs()), (1, 32));
        assert_eq!(plan.embedding_scale, 1.0);
        assert!(
            plan.layers
                .iter()
                .all(|layer| layer.window.is_none() && layer.rope == 0)
        );
    }

    #[test]
    fn layers_with_a_window_have_it_and_their_own_rope() {
        let mut config = config();
        let window = |tokens| {
            Some(Window {
                tokens,
                layers: WindowLayers::AllBut { every: 2 },
            })
        };
        config.window = window(1_024);
        config.window_rope = Some(Rope {
            base: 1e6,
            ..config.rope.clone()
        });
        let plan = plan_of(&config).unwrap();
        let layers: Vec<(Option<u32>, usize)> = plan.layers.iter().map(|layer| (layer.window, layer.rope)).collect();
        assert_eq!(layers, [(Some(1_024), 1), (None, 0)]);
        config.window = window(usize::MAX);
        assert_eq!(plan_of(&config).unwrap().layers[0].window, None, "it is never full");
    }

    #[test]
    fn models_without_kernels_are_refused_by_name() {
        let mut odd = config();
        odd.ffn_size = 1_540;
        let what = "a feed-forward size";
        assert_eq!(
            plan_of(&odd).err(),
            Some(UnsupportedModel::NotMultiple { what, value: 1_540 })
        );
        let mut long = config();
        long.context_length = CONTEXT_MAX + 1;
        assert!(matches!(plan_of(&long), Err(UnsupportedModel::Context { .. })));
    }

    #[test]
    fn a_step_has_room_for_its_limits_and_for_a_padded_graph() {
        let limits = EngineLimits {
            max_batch_tokens: 16,
            max_sequences: 4,
        };
        let capacity = Capacity::of(limits, (8_193, 16), Mode::Fast).unwrap();
        // 33 splits become 64, of 16 blocks each.
        assert_eq!((capacity.rows, capacity.sequences, capacity.stride), (64, 64, 1_024));
        assert_eq!(Capacity::of(limits, (1, 256), Mode::Invariant).unwrap().parts, 0);
        for block_tokens in [0, 8, 48, 512] {
            assert!(
                Capacity::of(limits, (1, block_tokens), Mode::Fast).is_err(),
                "{block_tokens}"
            );
        }
    }
}
