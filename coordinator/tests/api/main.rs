//! The HTTP edge over real sockets, with a scripted control loop behind it.
//! Never starts a node: what crosses processes is tested in `integration-tests`.
//! Read first: `harness` (the scripted `Submit`) and `script` (what it plays), then `completions`.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod bad_input;
mod byte_model;
mod cache;
mod chat;
mod client;
#[allow(dead_code, reason = "shared with the tests of scripted nodes")]
#[path = "../common/mod.rs"]
mod common;
mod completions;
mod connection;
mod constraints;
mod errors;
mod floods;
mod harness;
mod info;
mod keys;
mod other_origins;
mod responses;
mod script;
mod service_levels;
mod several_prompts;
mod streaming;
mod surface;
mod tls;
mod tools;
