//! Whole-cluster behaviour with real processes: one binary, since linking one takes as long as running a test of it.

#![forbid(unsafe_code)]

mod alone;
mod api_tls;
mod compare;
mod device_memory;
mod etcd;
mod every_family;
mod fault_runs;
mod flight_record;
mod goldens;
mod gpu;
mod identity;
mod incompatible_pairs;
mod load;
mod local_config;
mod membership;
mod own_models;
mod prefix_directory;
mod ready_means;
mod recorded_traffic;
mod reset_prefix_cache;
mod same_tokens_as_one_node;
mod several_coordinators;
mod shared_weights;
mod speculation;
mod starts_by_hand;
mod step_target;
mod trace_content;
mod up_behaves;
