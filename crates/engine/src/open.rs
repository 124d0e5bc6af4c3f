//! From a node's settings to a running engine, and to what decides with which nodes it may exchange KV.

use std::path::Path;

use model_files::model::{Model, ModelError};
use model_files::tokenizer::TokenizerError;
use serving_core::compatibility::{Compatibility, CompatibilityFacts, CompatibilityHash};
use sha2::{Digest as _, Sha256};
use thiserror::Error;

use crate::{
    Engine, EngineError, EngineLimits, KeptWeights, KernelChoice, KvBacking, LoadProgress, MemoryNeed, MemoryRoom,
    ModelFacts, NotEnoughMemory, Numerics, SampleError, memory_need as need,
};

type Opener = fn(Option<&Model>, OpenOptions<'_>) -> Result<Box<dyn Engine>, OpenError>;

/// Declares the engines: each a name of `--engine`, and what opens it.
macro_rules! engines {
    ($($(#[$about:meta])* $name:ident => $open:path,)+) => {
        /// Which engine a node runs.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum EngineKind {
            $($(#[$about])* $name,)+
        }

        impl EngineKind {
            #[expect(unused_doc_comments, reason = "an arm has all attributes of its engine; `cfg` must be among them")]
            fn opener(self) -> Opener {
                match self {
                    $($(#[$about])* Self::$name => $open,)+
                }
            }
        }
    };
}

engines! {
    /// The model, on the host's processors.
    Cpu => crate::cpu::open,
    /// No weights: for emulated clusters and tests. With a model file it takes the vocabulary and context from it.
    StandIn => crate::stand_in::open,
    /// The stand-in on a double of a device, whose memory the host cannot address: for tests.
    DeviceStandIn => crate::device_stand_in::open,
}

/// A node's settings, as far as they concern the engine.
pub struct OpenOptions<'a> {
    pub kind: EngineKind,
    pub model: Option<&'a Path>,
    pub numerics: Numerics,
    pub kernel: KernelChoice,
    pub threads: usize,
    /// Tokens of a KV block.
    pub block_tokens: u32,
    pub kv_bytes: u64,
    pub kv_backing: KvBacking,
    pub limits: EngineLimits,
    /// Version of the wire; part of the compatibility hash.
    pub protocol_version: u32,
    /// Weights of an engine that this process had before. Packing takes most of the time of opening.
    pub kept_weights: KeptWeights,
    pub progress: Option<&'a mut dyn FnMut(LoadProgress)>,
}

impl std::fmt::Debug for OpenOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenOptions")
            .field("kind", &self.kind)
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

pub struct OpenedEngine {
    pub engine: Box<dyn Engine>,
    pub compatibility: Compatibility,
    /// That of the model's file or folder; without one the engine's.
    pub model_name: String,
}

impl std::fmt::Debug for OpenedEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenedEngine")
            .field("compatibility", &self.compatibility)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Error)]
pub enum OpenError {
    #[error(
        "the cpu engine needs a model: give --model with a GGUF file or a Hugging Face folder; `baton model pull smollm2-135m` fetches one and prints its path"
    )]
    NoModel,
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("the model file's tokenizer cannot be used: {0}")]
    Tokenizer(#[from] TokenizerError),
    /// Nothing was loaded.
    #[error(transparent)]
    Memory(#[from] NotEnoughMemory),
    #[error("the model cannot be sampled from: {0}")]
    Sampler(#[from] SampleError),
    #[error(
        "the {engine:?} engine computes nothing on {device}: leave --device out, or take --engine cpu, which then uses the GPU"
    )]
    NoSuchDevice { engine: EngineKind, device: String },
    /// From an engine on a device, in its own words.
    #[error(transparent)]
    Device(Box<dyn std::error::Error + Send + Sync>),
}

/// Opens the engine. Takes seconds for a real model: call it off the async threads.
///
/// # Errors
/// [`OpenError`]; all are the settings' or the file's fault.
pub fn open_engine(options: OpenOptions<'_>) -> Result<OpenedEngine, OpenError> {
    let (opener, file) = (options.kind.opener(), options.model.map(Model::open).transpose()?);
    // Before anything reads the file whole: what does not fit is refused at once.
    check_memory(file.as_ref(), &options)?;
    open_file(file, options, |file, options, fits| {
        fits();
        opener(file, options)
    })
}

/// Opens an engine of another crate, which looks after the memory that it needs. It calls its last argument once it knows that the
/// model fits: from there on the file is read whole, for its hash.
///
/// # Errors
/// As [`open_engine`].
pub fn open_engine_by(
    options: OpenOptions<'_>,
    opener: impl FnOnce(Option<&Model>, OpenOptions<'_>, &mut dyn FnMut()) -> Result<Box<dyn Engine>, OpenError>,
) -> Result<OpenedEngine, OpenError> {
    let file = options.model.map(Model::open).transpose()?;
    open_file(file, options, opener)
}

fn open_file(
    file: Option<Model>,
    options: OpenOptions<'_>,
    opener: impl FnOnce(Option<&Model>, OpenOptions<'_>, &mut dyn FnMut()) -> Result<Box<dyn Engine>, OpenError>,
) -> Result<OpenedEngine, OpenError> {
    let protocol_version = options.protocol_version;
    let model = file.as_ref();
    let (tokenizer_hash, engine) = std::thread::scope(|scope| {
        // Both hashes take longer than the weights are packed.
        let hash = model.map(|model| scope.spawn(|| model.tokenizer().map(|tokenizer| tokenizer.content_hash())));
        // Whoever needs the content's hash waits for the thread that computes it.
        let mut fits = || {
            if let Some(model) = model {
                scope.spawn(|| model.content_sha256());
            }
        };
        let engine = opener(model, options, &mut fits);
        let tokenizer_hash = match hash.map(|hash| hash.join()) {
            Some(Ok(hash)) => hash?,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => [0; 32],
        };
        Ok::<_, OpenError>((tokenizer_hash, engine?))
    })?;
    let compatibility = compatibility(engine.model(), tokenizer_hash, protocol_version);
    let model_name = file.map_or_else(|| engine.model().name.clone(), |file| file.name());
    Ok(OpenedEngine {
        engine,
        compatibility,
        model_name,
    })
}

/// The memory that [`open_engine`] takes, from the model's tensor table and the settings.
///
/// # Errors
/// The model file's fault.
pub fn memory_need(options: &OpenOptions<'_>) -> Result<MemoryNeed, OpenError> {
    let file = options.model.map(Model::open).transpose()?;
    Ok(need_of(file.as_ref(), options)?)
}

fn need_of(file: Option<&Model>, options: &OpenOptions<'_>) -> Result<MemoryNeed, EngineError> {
    let (weights, buffers) = match (options.kind, file) {
        (EngineKind::Cpu, Some(file)) => (
            crate::cpu::weights_bytes(file, options.numerics)?,
            need::buffer_bytes(file.config(), options.limits, options.threads),
        ),
        _ => (0, 0),
    };
    Ok(MemoryNeed {
        weights,
        kv: options.kv_bytes,
        buffers,
    })
}

/// Refuses what cannot end well. Weights that are shared, or that an earlier engine has packed, are not counted: they may
/// be there already.
fn check_memory(file: Option<&Model>, options: &OpenOptions<'_>) -> Result<(), OpenError> {
    let mut need = need_of(file, options)?;
    if !options.kept_weights.is_private_and_empty() {
        need.weights = 0;
    }
    match MemoryRoom::of_this_process() {
        Some(room) => Ok(need.check(room)?),
        None => Ok(()),
    }
}

/// The facts that decide whether another node may use this engine's KV bytes, with the hash over them (PROTOCOL rule 13).
pub fn compatibility(model: &ModelFacts, tokenizer_sha256: [u8; 32], protocol_version: u32) -> Compatibility {
    let ModelFacts {
        name: _,
        vocab_size,
        context_length,
        numerics_id,
        weights_sha256,
        kv,
        rope_base,
        rank,
    } = model;
    let facts = CompatibilityFacts {
        weights_sha256: *weights_sha256,
        tokenizer_sha256,
        numerics_id: numerics_id.clone(),
        kv_dtype: kv.dtype.name().to_owned(),
        block_tokens: kv.block_tokens,
        layer_count: kv.layer_count,
        kv_head_count: kv.kv_head_count,
        head_dim: kv.head_dim,
        vocab_size: *vocab_size,
        context_length: *context_length,
        rope_base: *rope_base,
        rank_count: rank.count,
        protocol_version,
    };
    Compatibility {
        hash: hash_of(&facts),
        facts: Some(Box::new(facts)),
    }
}

/// Nodes of all versions compare this hash: it changes with a fact, and with nothing else.
fn hash_of(facts: &CompatibilityFacts) -> CompatibilityHash {
    let CompatibilityFacts {
        weights_sha256,
        tokenizer_sha256,
        numerics_id,
        kv_dtype,
        block_tokens,
        layer_count,
        kv_head_count,
        head_dim,
        vocab_size,
        context_length,
        rope_base,
        rank_count,
        protocol_version,
    } = facts;
    let mut hasher = Sha256::new();
    hasher.update(b"baton compatibility 1\0");
    hasher.update(weights_sha256);
    hasher.update(tokenizer_sha256);
    hasher.update(numerics_id.as_bytes());
    hasher.update([0]);
    hasher.update(kv_dtype.as_bytes());
    hasher.update([0]);
    let numbers = [
        *vocab_size,
        *context_length,
        *layer_count,
        *kv_head_count,
        *head_dim,
        *block_tokens,
        rope_base.to_bits(),
        *rank_count,
        *protocol_version,
    ];
    for number in numbers {
        hasher.update(number.to_le_bytes());
    }
    CompatibilityHash(hasher.finalize().into())
}

#[cfg(test)]
mod tests {
    use model_files::test_kit::TinyModel;

    use super::*;
    use crate::{BLOCK_TOKENS, KvDtype, KvGeometry};

    fn options(protocol_version: u32) -> OpenOptions<'static> {
        OpenOptions {
            kind: EngineKind::StandIn,
            model: None,
            numerics: Numerics::Int8Blocks,
            kernel: KernelChoice::Auto,
            threads: 1,
            block_tokens: BLOCK_TOKENS,
            kv_bytes: 1 << 20,
            kv_backing: KvBacking::Private,
            limits: EngineLimits {
                max_batch_tokens: 64,
                max_sequences: 4,
            },
            protocol_version,
            kept_weights: KeptWeights::default(),
            progress: None,
        }
    }

    #[test]
    fn equal_settings_are_compatible_and_each_difference_is_not() {
        let base = open_engine(options(1)).expect("no file needed");
        assert_eq!(
            base.compatibility,
            open_engine(options(1)).expect("again").compatibility
        );
        assert_ne!(
            base.compatibility.hash,
            open_engine(options(2)).expect("again").compatibility.hash
        );
        let facts = base.engine.model();
        let told = |facts: &ModelFacts| compatibility(facts, [0; 32], 1);
        let hash = |facts: &ModelFacts| told(facts).hash;
        assert_eq!(told(facts), base.compatibility);
        let named = ModelFacts {
            name: "another name".to_owned(),
            ..facts.clone()
        };
        assert_eq!(told(&named), base.compatibility, "a name is for people");
        let changed = [
            ModelFacts {
                numerics_id: "x".to_owned(),
                ..facts.clone()
            },
            ModelFacts {
                weights_sha256: [9; 32],
                ..facts.clone()
            },
            ModelFacts {
                rope_base: 1.0,
                ..facts.clone()
            },
            ModelFacts {
                rank: crate::Rank { index: 0, count: 2 },
                ..facts.clone()
            },
            ModelFacts {
                kv: KvGeometry {
                    dtype: KvDtype::F32,
                    ..facts.kv
                },
                ..facts.clone()
            },
            ModelFacts {
                kv: KvGeometry {
                    layer_count: 1,
                    ..facts.kv
                },
                ..facts.clone()
            },
        ];
        for facts in changed {
            assert_ne!(hash(&facts), base.compatibility.hash, "{facts:?}");
        }
        assert_ne!(compatibility(facts, [1; 32], 1).hash, base.compatibility.hash);
    }

    /// To read the file whole takes minutes. It has no bytes on the disk behind those of its tensors.
    #[test]
    fn a_model_that_does_not_fit_is_refused_before_its_file_is_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path: &Path = Box::leak(folder.path().join("tiny.gguf").into_boxed_path());
        TinyModel::default().build().write(path).expect("it is written");
        let file = std::fs::OpenOptions::new().write(true).open(path);
        let file = file.expect("it is there");
        file.set_len(1 << 38).expect("a file with a hole");
        let options = || OpenOptions {
            kind: EngineKind::Cpu,
            model: Some(path),
            kv_bytes: 1 << 50,
            ..options(1)
        };
        let refused = open_engine(options()).expect_err("there is no such memory");
        assert!(matches!(refused, OpenError::Memory(_)), "{refused}");
        let refused = open_engine_by(options(), |_, _, _| Err(OpenError::NoModel));
        assert!(matches!(refused, Err(OpenError::NoModel)));
    }

    #[test]
    fn the_cpu_engine_asks_for_a_model() {
        let error = open_engine(OpenOptions {
            kind: EngineKind::Cpu,
            ..options(1)
        })
        .expect_err("no model");
        assert!(error.to_string().contains("baton model pull"));
    }
}
