//! One node's settings in each role. Keys that both roles have keep their values. Keys of the next role alone come from the
//! environment and the defaults, as if the process had been started in that role.

use service_runtime::config::{self, ConfigError};
use serving_core::node::AssignedRole;

/// Keys that only one role has. A key that is missing here keeps its default when a node takes the role later.
const PREFILL_ONLY: [&str; 3] = ["last_chunk_tokens", "hold_ms_max", "push_queue_blocks_max"];
const DECODE_ONLY: [&str; 3] = ["kv_advertise", "direct_checksums", "reservation_ms_max"];

/// The settings of one node in either role.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    pub role: AssignedRole,
    pub prefill: prefill_node::Config,
    pub decode: decode_node::Config,
}

impl NodeSettings {
    /// # Errors
    /// The environment has a bad value for a key of the other role.
    pub fn of_prefill(mut prefill: prefill_node::Config) -> Result<Self, ConfigError> {
        prefill.node.roles = AssignedRole::ALL.to_vec();
        let decode = decode_node::Config {
            node: prefill.node.clone(),
            ..config::without_flags(decode_node::PROGRAM, &DECODE_ONLY)?
        };
        Ok(Self {
            role: AssignedRole::Prefill,
            prefill,
            decode,
        })
    }

    /// # Errors
    /// The environment has a bad value for a key of the other role.
    pub fn of_decode(mut decode: decode_node::Config) -> Result<Self, ConfigError> {
        decode.node.roles = AssignedRole::ALL.to_vec();
        let prefill = prefill_node::Config {
            node: decode.node.clone(),
            ..config::without_flags(prefill_node::PROGRAM, &PREFILL_ONLY)?
        };
        let role = match decode.co_located {
            true => AssignedRole::CoLocated,
            false => AssignedRole::Decode,
        };
        Ok(Self { role, prefill, decode })
    }

    /// The same node in another role.
    pub fn change_role(&mut self, role: AssignedRole) {
        self.role = role;
        self.decode.co_located = role == AssignedRole::CoLocated;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_both_roles_know_goes_along_and_the_rest_is_there_on_the_way_back() {
        let mut started: prefill_node::Config = config::without_flags(prefill_node::PROGRAM, &[]).expect("defaults");
        started.node.name = "n".to_owned();
        started.node.advertise = Some("host:1".to_owned());
        started.node.block_size = 32;
        started.node.threads = Some(3);
        started.last_chunk_tokens = 7;
        let mut settings = NodeSettings::of_prefill(started).expect("settings");
        settings.change_role(AssignedRole::CoLocated);
        let (decode, node) = (&settings.decode, &settings.decode.node);
        assert_eq!((node.name.as_str(), node.block_size, node.threads), ("n", 32, Some(3)));
        assert_eq!(node.advertise.as_deref(), Some("host:1"));
        assert!(decode.co_located);
        assert_eq!(node.roles, AssignedRole::ALL, "it can go back");
        settings.change_role(AssignedRole::Decode);
        assert!(!settings.decode.co_located);
        settings.change_role(AssignedRole::Prefill);
        assert_eq!(
            (settings.role, settings.prefill.last_chunk_tokens),
            (AssignedRole::Prefill, 7)
        );

        let again = NodeSettings::of_decode(settings.decode).expect("settings");
        assert_eq!((again.role, again.prefill.node.block_size), (AssignedRole::Decode, 32));
        assert_eq!(again.prefill.last_chunk_tokens, 32, "as if started so");
    }
}
