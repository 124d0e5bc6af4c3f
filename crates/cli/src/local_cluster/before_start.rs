//! Whether the processes of a cluster would take their settings, its model and each other. All of it is asked before one of them
//! is started.

use std::path::PathBuf;

use coordinator::registry::MembershipKind;
use cuda_engine::DeviceChoice;
use engine::for_devices::check_block_tokens;
use engine::{EngineKind, KvMemoryError, OpenError};
use model_files::config::ModelConfig;
use model_files::model::{Model, ModelError};
use node::NodeConfig;
use service_runtime::config::{self, ByteSize, ConfigError, Outcome};
use thiserror::Error;

use super::kind::ProcessKind;
use super::options::LocalClusterOptions;
use super::specs::ProcessSpec;
use crate::exit::Exit;

/// What would end a process right after its start. The person who gave the settings or the model can mend it.
#[derive(Debug, Error)]
pub(crate) enum Refused {
    #[error("{process} does not take its settings")]
    Settings { process: String, source: Box<ConfigError> },
    #[error("--membership: {0}")]
    Etcd(String),
    #[error("{} cannot be used", .path.display())]
    Model { path: PathBuf, source: Box<ModelError> },
    #[error(transparent)]
    BlockSize(#[from] KvMemoryError),
    #[error("this model cannot run with these settings")]
    Engine(#[source] Box<OpenError>),
    #[error(
        "--max-model-len {asked} is more than the {trained} tokens that this model was trained for; choose a smaller one"
    )]
    ContextTooLong { asked: u32, trained: usize },
    #[error(
        "--kv-cache-memory {given} holds no KV block of this model, which takes {block_bytes} bytes; give more, such as the default of 512MiB"
    )]
    NoBlock { given: ByteSize, block_bytes: u64 },
    #[error(
        "--kv-cache-memory {given} holds {held} tokens of this model, and --max-model-len allows requests of {asked}: give more memory, or lower --max-model-len"
    )]
    RequestTooLarge { given: ByteSize, held: u64, asked: u32 },
}

impl Refused {
    /// The status with which this error ends a verb.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Model { .. } | Self::Engine(_) => Exit::Failure,
            Self::Settings { .. }
            | Self::Etcd(_)
            | Self::BlockSize(_)
            | Self::ContextTooLong { .. }
            | Self::NoBlock { .. }
            | Self::RequestTooLarge { .. } => Exit::Usage,
        }
    }
}

impl LocalClusterOptions {
    /// Reads the settings of every process as the process is going to read them. Needs no model.
    ///
    /// # Errors
    /// [`Refused::Settings`] of the first process that would refuse its own.
    pub(crate) fn check_settings(&self) -> Result<(), Refused> {
        for spec in self.coordinators().iter().chain(&self.nodes(ANY_COORDINATOR)) {
            let settings = |error| Refused::Settings {
                process: spec.name.clone(),
                source: Box::new(error),
            };
            match spec.kind {
                ProcessKind::Coordinator => {
                    let read = self.load::<coordinator::Config>(coordinator::PROGRAM, spec);
                    if let Some(config) = read.map_err(settings)? {
                        let membership = config.membership.used_by(&config.tls);
                        membership.map_err(|error| Refused::Etcd(error.to_string()))?;
                    }
                }
                _ => drop(self.node_config(spec).map_err(settings)?),
            }
        }
        Ok(())
    }

    /// The membership as the coordinators use it. `None`: their settings are refused, or ask for help only.
    pub(super) fn membership_in_use(&self) -> Option<MembershipKind> {
        let spec = self.coordinators().into_iter().next()?;
        let config = self.load::<coordinator::Config>(coordinator::PROGRAM, &spec).ok()??;
        config.membership.used_by(&config.tls).ok()
    }

    /// Compares the nodes' settings with the model. Returns what a person should know besides.
    ///
    /// # Errors
    /// [`Refused`], but for bad settings, which [`Self::check_settings`] finds.
    pub(crate) fn check_model(&self) -> Result<Vec<String>, Refused> {
        let model = Model::open(&self.model).map_err(|error| Refused::Model {
            path: self.model.clone(),
            source: Box::new(error),
        })?;
        let mut notes = Vec::new();
        for spec in self.nodes(ANY_COORDINATOR) {
            let Ok(Some(node)) = self.node_config(&spec) else {
                continue;
            };
            check_block_tokens(node.block_size)?;
            // The model's weights, in numbers that the engine has code for.
            node.memory_need().map_err(|error| Refused::Engine(Box::new(error)))?;
            let note = check_lengths(&node, model.config())?;
            // Nodes that are set alike say the same.
            notes.extend(note.filter(|note| !notes.contains(note)));
        }
        Ok(notes)
    }

    /// A node's settings. `None`: they ask for help only.
    pub(super) fn node_config(&self, spec: &ProcessSpec) -> Result<Option<NodeConfig>, ConfigError> {
        Ok(match spec.kind {
            ProcessKind::Coordinator => None,
            ProcessKind::Prefill => {
                let read = self.load::<prefill_node::Config>(prefill_node::PROGRAM, spec)?;
                read.map(|config| config.node)
            }
            ProcessKind::Decode | ProcessKind::CoLocated => {
                let read = self.load::<decode_node::Config>(decode_node::PROGRAM, spec)?;
                read.map(|config| config.node)
            }
        })
    }

    fn load<T: clap::Args + serde::Serialize>(
        &self,
        program: config::Program,
        spec: &ProcessSpec,
    ) -> Result<Option<T>, ConfigError> {
        let own = |name: &str| self.environment.iter().find(|(key, _)| key == name);
        let environment = |name: &str| match own(name) {
            Some((_, value)) => Some(value.clone()),
            None => std::env::var(name).ok(),
        };
        // The verb stands where a program's name does.
        let arguments = spec.arguments.iter().cloned();
        Ok(match config::load::<T>(program, arguments, &environment)? {
            Outcome::Run(loaded) => Some(loaded.config),
            Outcome::Print(_) => None,
        })
    }
}

/// Where nodes are told to look for a coordinator before there is one.
const ANY_COORDINATOR: &str = "127.0.0.1:1";

/// Compares the longest request with the model and, on the host, with the memory for KV. Returns a note on requests that the
/// model could take and the memory cannot.
fn check_lengths(node: &NodeConfig, model: &ModelConfig) -> Result<Option<String>, Refused> {
    let trained = model.context_length;
    if let Some(asked) = node.max_model_len.filter(|asked| *asked as usize > trained) {
        return Err(Refused::ContextTooLong { asked, trained });
    }
    // Stand-ins have a KV of their own, and an engine on a GPU looks after its memory itself.
    if node.engine != EngineKind::Cpu || matches!(node.device, DeviceChoice::Cuda(_)) {
        return Ok(None);
    }
    let given = node.kv_cache_memory;
    let token_bytes = (2 * model.layer_count * model.kv_size() * node.numerics.kv_dtype().bytes()) as u64;
    let block_tokens = u64::from(node.block_size);
    let block_bytes = token_bytes.saturating_mul(block_tokens).max(1);
    let held = (given.bytes() / block_bytes).saturating_mul(block_tokens);
    match node.max_model_len {
        _ if held == 0 => Err(Refused::NoBlock { given, block_bytes }),
        Some(asked) if u64::from(asked) > held => Err(Refused::RequestTooLarge { given, held, asked }),
        None if trained as u64 > held => Ok(Some(format!(
            "requests of more than {held} tokens are refused: --kv-cache-memory {given} holds no more (the model: {trained})"
        ))),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model_files::test_kit::TinyModel;

    fn options(settings: &[(&str, &str)]) -> (tempfile::TempDir, LocalClusterOptions) {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("tiny.gguf");
        TinyModel::default()
            .build()
            .write(&model)
            .expect("room for a tiny model");
        let topology = "2p1d".parse().expect("a topology");
        let mut options = LocalClusterOptions::new("/bin/baton".into(), topology, model);
        let environment = settings
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        options.environment = environment.collect();
        (folder, options)
    }

    #[test]
    fn settings_that_a_process_would_refuse_are_refused_before_it_starts() {
        assert!(options(&[]).1.check_settings().is_ok());
        for (key, value, process) in [
            ("BATON_KERNEL", "abacus", "prefill-0"),
            ("BATON_TRANSPORTS", "pigeon", "prefill-0"),
            ("BATON_KV_CACHE_MEMORY", "much", "prefill-0"),
            ("BATON_RESERVATION_MS_MAX", "x", "decode-0"),
            ("BATON_ROUTING", "by-mood", "coordinator"),
        ] {
            let error = options(&[(key, value)]).1.check_settings().expect_err("refused");
            let Refused::Settings { process: named, source } = &error else {
                panic!("{error:?}")
            };
            assert_eq!(named, process, "{source}");
            assert!(source.to_string().contains(value), "{source}");
        }
    }

    #[test]
    fn a_cluster_that_could_not_take_one_request_is_refused() {
        let check = |settings: &[(&str, &str)]| options(settings).1.check_model();
        assert_eq!(check(&[]).expect("it fits"), Vec::<String>::new());
        let error = check(&[("BATON_KV_CACHE_MEMORY", "1B")]).expect_err("no block");
        assert!(matches!(error, Refused::NoBlock { .. }), "{error}");
        let error = check(&[("BATON_MAX_MODEL_LEN", "1000000")]).expect_err("too long");
        assert!(matches!(error, Refused::ContextTooLong { .. }), "{error}");
        let error = check(&[("BATON_BLOCK_SIZE", "17")]).expect_err("no such block");
        assert!(matches!(error, Refused::BlockSize(_)), "{error}");
        let few = [("BATON_KV_CACHE_MEMORY", "8KiB"), ("BATON_MAX_MODEL_LEN", "64")];
        let error = check(&few).expect_err("more than there is room for");
        assert!(matches!(error, Refused::RequestTooLarge { asked: 64, .. }), "{error}");
        // Without a wish the memory decides, and a person is told once for all nodes.
        let notes = check(&few[..1]).expect("it can serve short requests");
        assert!(notes.len() == 1 && notes[0].contains("--kv-cache-memory"), "{notes:?}");
    }

    #[test]
    fn a_file_that_is_no_model_is_refused_by_name() {
        let (_folder, options) = options(&[]);
        std::fs::write(&options.model, b"this is not a model").expect("written");
        let error = options.check_model().expect_err("no model");
        assert!(error.to_string().contains("tiny.gguf"), "{error}");
    }
}
