//! Owns the wire: the protos, their generated types, the same messages in core types (`messages`), the conversion
//! between the two (`convert`: `From` and `TryFrom`), and the status table (`status`).
//! Never decides anything; generated types stay out of every other crate's public signatures.
//! Read first: the `.proto` files under `baton/v1/`, whose comments are the reference; then `messages`.
//! Tests: beside the conversions (round trips, hostile values).

#![forbid(unsafe_code)]

/// Generated from `baton/v1/*.proto` by `tools/generate-wire`, and kept in the repository: whoever builds baton builds no
/// protobuf compiler.
#[allow(clippy::all, missing_debug_implementations)]
pub mod v1 {
    include!("../generated/baton.v1.rs");
}

pub mod convert;
pub mod kv_stream;
pub mod messages;
pub mod status;

#[cfg(test)]
mod generated_tests;
