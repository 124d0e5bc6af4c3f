//! One node's settings in each role. Keys that both roles have keep their values. Keys of the next role alone come from the
//! environment and the defaults, as if the process had been started in that role.

use service_runtime::config::{self, ConfigError};
use serving_core::node::AssignedRole;

/// Keys that only one role has.
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
    pub fn of_prefill(config: prefill_node::Config) -> Result<Self, ConfigError> {
        let prefill = prefill_node::Config {
            roles: AssignedRole::ALL.to_vec(),
            ..config
        };
        Ok(Self {
            role: AssignedRole::Prefill,
            decode: decode_of(prefill.clone())?,
            prefill,
        })
    }

    /// # Errors
    /// The environment has a bad value for a key of the other role.
    pub fn of_decode(config: decode_node::Config) -> Result<Self, ConfigError> {
        let decode = decode_node::Config {
            roles: AssignedRole::ALL.to_vec(),
            ..config
        };
        let role = match decode.co_located {
            true => AssignedRole::CoLocated,
            false => AssignedRole::Decode,
        };
        Ok(Self {
            role,
            prefill: prefill_of(decode.clone())?,
            decode,
        })
    }

    /// The same node in another role.
    pub fn change_role(&mut self, role: AssignedRole) {
        self.role = role;
        self.decode.co_located = role == AssignedRole::CoLocated;
    }
}

fn decode_of(config: prefill_node::Config) -> Result<decode_node::Config, ConfigError> {
    // Each key is named, so that a new key must be decided here.
    let prefill_node::Config {
        name,
        listen,
        advertise,
        coordinators,
        model,
        served_model_name,
        engine,
        numerics,
        kernel,
        threads,
        kv_cache_memory,
        block_size,
        max_num_seqs,
        max_num_batched_tokens,
        last_chunk_tokens: _,
        max_model_len,
        prefix_cache,
        transports,
        shm_direct_secret,
        hold_ms_max: _,
        push_queue_blocks_max: _,
        drain_ms_max,
        roles,
        guard,
        otel,
        metrics,
    } = config;
    Ok(decode_node::Config {
        name,
        listen,
        advertise,
        coordinators,
        model,
        served_model_name,
        engine,
        numerics,
        kernel,
        threads: threads.map(|threads| threads as usize),
        kv_cache_memory,
        block_size,
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        prefix_cache,
        transports,
        shm_direct_secret,
        drain_ms_max,
        roles,
        guard,
        otel,
        metrics,
        ..config::without_flags(decode_node::PROGRAM, &DECODE_ONLY)?
    })
}

fn prefill_of(config: decode_node::Config) -> Result<prefill_node::Config, ConfigError> {
    let decode_node::Config {
        name,
        listen,
        advertise,
        kv_advertise: _,
        coordinators,
        model,
        served_model_name,
        engine,
        numerics,
        kernel,
        threads,
        kv_cache_memory,
        block_size,
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        prefix_cache,
        co_located: _,
        transports,
        shm_direct_secret,
        direct_checksums: _,
        reservation_ms_max: _,
        drain_ms_max,
        roles,
        guard,
        otel,
        metrics,
    } = config;
    Ok(prefill_node::Config {
        name,
        listen,
        advertise,
        coordinators,
        model,
        served_model_name,
        engine,
        numerics,
        kernel,
        threads: threads.map(|threads| u32::try_from(threads).unwrap_or(u32::MAX)),
        kv_cache_memory,
        block_size,
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len,
        prefix_cache,
        transports,
        shm_direct_secret,
        drain_ms_max,
        roles,
        guard,
        otel,
        metrics,
        ..config::without_flags(prefill_node::PROGRAM, &PREFILL_ONLY)?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_both_roles_know_goes_along_and_the_rest_is_there_on_the_way_back() {
        let started = prefill_node::Config {
            name: "n".to_owned(),
            advertise: Some("host:1".to_owned()),
            block_size: 32,
            threads: Some(3),
            last_chunk_tokens: 7,
            ..config::without_flags(prefill_node::PROGRAM, &[]).expect("defaults")
        };
        let mut settings = NodeSettings::of_prefill(started).expect("settings");
        settings.change_role(AssignedRole::CoLocated);
        let decode = &settings.decode;
        assert_eq!(
            (decode.name.as_str(), decode.block_size, decode.threads),
            ("n", 32, Some(3))
        );
        assert_eq!(decode.advertise.as_deref(), Some("host:1"));
        assert!(decode.co_located);
        assert_eq!(decode.roles, AssignedRole::ALL, "it can go back");
        settings.change_role(AssignedRole::Decode);
        assert!(!settings.decode.co_located);
        settings.change_role(AssignedRole::Prefill);
        assert_eq!(
            (settings.role, settings.prefill.last_chunk_tokens),
            (AssignedRole::Prefill, 7)
        );

        let again = NodeSettings::of_decode(settings.decode).expect("settings");
        assert_eq!((again.role, again.prefill.block_size), (AssignedRole::Decode, 32));
        assert_eq!(again.prefill.last_chunk_tokens, 32, "as if started so");
    }
}
