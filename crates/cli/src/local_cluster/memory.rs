//! Whether the nodes of a cluster fit the memory of this machine. This is asked before any of them is started.

use engine::{MemoryNeed, MemoryRoom, NotEnoughMemory};
use service_runtime::config::{self, Outcome};

use super::options::{LocalClusterOptions, ProcessKind, ProcessSpec};

impl LocalClusterOptions {
    /// Adds up what the nodes are going to take, as their own configurations say it.
    ///
    /// # Errors
    /// They need more than there is.
    pub fn check_memory(&self) -> Result<(), NotEnoughMemory> {
        let Some(room) = MemoryRoom::of_this_process() else {
            return Ok(());
        };
        // A node that cannot read its settings or its model says so itself, in its own words.
        let needs = self
            .nodes("127.0.0.1:1")
            .into_iter()
            .filter_map(|spec| self.need(&spec));
        let both = match self.shares_weights() {
            true => MemoryNeed::beside_with_shared_weights,
            false => MemoryNeed::beside,
        };
        needs.fold(MemoryNeed::default(), both).check(room)
    }

    fn need(&self, spec: &ProcessSpec) -> Option<MemoryNeed> {
        let own = |name: &str| self.environment.iter().find(|(key, _)| key == name);
        let environment = |name: &str| match own(name) {
            Some((_, value)) => Some(value.clone()),
            None => std::env::var(name).ok(),
        };
        // The verb stands where a program's name does.
        let arguments = spec.arguments.iter().cloned();
        let node = match spec.kind {
            ProcessKind::Coordinator => return None,
            ProcessKind::Prefill => {
                let read = config::load::<prefill_node::Config>(prefill_node::PROGRAM, arguments, &environment);
                running(read)?.node
            }
            ProcessKind::Decode | ProcessKind::CoLocated => {
                let read = config::load::<decode_node::Config>(decode_node::PROGRAM, arguments, &environment);
                running(read)?.node
            }
        };
        node.memory_need().ok()
    }
}

fn running<T>(read: Result<Outcome<T>, config::ConfigError>) -> Option<T> {
    match read {
        Ok(Outcome::Run(loaded)) => Some(loaded.config),
        _ => None,
    }
}
