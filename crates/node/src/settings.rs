//! The settings with which a node starts, made from the configuration of its role.

use std::num::NonZeroU32;
use std::time::Duration;

use kv_transfer::DirectSecret;
use serving_core::node::NodeRole;
use serving_core::scheduler::{NodeLimits, SchedulerConfig};

use crate::config::NodeConfig;

/// What a node is told.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// What nodes of both roles are told.
    pub config: NodeConfig,
    /// The program's.
    pub version: &'static str,
    pub role: RoleSettings,
}

/// What only one role is told.
#[derive(Clone, Debug)]
pub enum RoleSettings {
    Prefill(PrefillSettings),
    Decode(DecodeSettings),
}

#[derive(Clone, Debug)]
pub struct PrefillSettings {
    /// As [`SchedulerConfig::hold`].
    pub hold: Duration,
    /// As [`SchedulerConfig::last_chunk_tokens`].
    pub last_chunk_tokens: Option<NonZeroU32>,
    /// Decode nodes that hold the same are written in place over shared memory.
    pub direct_secret: Option<DirectSecret>,
    /// Blocks waiting to be pushed before no further work is asked for; `None`: half the pool.
    pub push_queue_blocks_max: Option<u32>,
}

#[derive(Clone, Debug)]
pub struct DecodeSettings {
    /// As [`SchedulerConfig::reservation`].
    pub reservation: Duration,
    /// It computes every prompt itself.
    pub is_co_located: bool,
    /// Where prefill nodes reach the handoff service, when it is not where everybody else reaches the node.
    pub kv_advertise: Option<String>,
    /// Prefill nodes that hold the same write this node's blocks in place over shared memory.
    pub direct_secret: Option<DirectSecret>,
    /// Whether what is written in place is summed at both ends.
    pub direct_checksums: bool,
}

impl NodeSettings {
    pub fn node_role(&self) -> NodeRole {
        match self.role {
            RoleSettings::Prefill(_) => NodeRole::Prefill,
            RoleSettings::Decode(_) => NodeRole::Decode,
        }
    }

    pub(crate) fn scheduler(&self, limits: NodeLimits) -> SchedulerConfig {
        let config = match &self.role {
            RoleSettings::Prefill(prefill) => SchedulerConfig::prefill(limits, prefill.hold, prefill.last_chunk_tokens),
            RoleSettings::Decode(decode) => SchedulerConfig::decode(limits, decode.reservation),
        };
        let target_ms = self.config.itl_target_ms;
        SchedulerConfig {
            step_target: target_ms.map(|target_ms| Duration::from_millis(target_ms.into())),
            mixed_step_tokens: self.config.mixed_step_tokens(),
            speculative_tokens: self.config.speculative_tokens,
            tenant_cached_blocks: percent_of(limits.kv_blocks, self.config.tenant_cache_percent),
            ..config
        }
    }
}

/// Rounded up.
fn percent_of(blocks: u32, percent: u32) -> u32 {
    let share = (u64::from(blocks) * u64::from(percent)).div_ceil(100);
    u32::try_from(share).unwrap_or(blocks)
}

#[cfg(test)]
mod tests {
    use super::percent_of;

    #[test]
    fn a_share_is_at_least_a_block_and_at_most_all() {
        assert_eq!(
            (percent_of(64, 50), percent_of(3, 1), percent_of(u32::MAX, 100)),
            (32, 1, u32::MAX)
        );
    }
}
