//! What the two ends of a transport of KV say to each other besides frames.

pub(crate) fn greeting(data: &[u8]) {
    kv_transfer::testing::check_greeting(data);
    // Almost no bytes begin as a greeting does.
    kv_transfer::testing::check_greeting(&[b"KVR3", data].concat());
}

pub(crate) fn nccl(data: &[u8]) {
    kv_transfer::testing::check_nccl_message(data);
}
