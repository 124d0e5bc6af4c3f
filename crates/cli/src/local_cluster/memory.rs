//! Whether the nodes of a cluster fit the memory of this machine. This is asked before any of them is started.

use engine::{MemoryNeed, MemoryRoom, NotEnoughMemory};

use super::options::LocalClusterOptions;
use super::specs::ProcessSpec;

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
        self.node_config(spec).ok()??.memory_need().ok()
    }
}
