//! Owns the wire: the protos, their generated types, the same messages in core types (`messages`), the conversion
//! between the two (`convert`: `From` and `TryFrom`), and the status table (`status`).
//! Never decides anything; generated types stay out of every other crate's public signatures.
//! Read first: the `.proto` files under `baton/v1/`, whose comments are the reference; then `messages`.
//! Tests: beside the conversions (round trips, hostile values).

/// Generated from `baton/v1/*.proto`.
#[allow(clippy::all, missing_debug_implementations)]
pub mod v1 {
    tonic::include_proto!("baton.v1");
}

pub mod convert;
pub mod kv_stream;
pub mod messages;
pub mod status;
