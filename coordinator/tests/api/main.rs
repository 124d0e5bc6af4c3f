//! The HTTP edge over real sockets, with a scripted control loop behind it.
//! Never starts a node: what crosses processes is tested in `integration-tests`.
//! Read first: `harness` (the scripted `Submit`), then `completions`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod bad_input;
mod chat;
mod client;
mod completions;
mod connection;
mod constraints;
mod errors;
mod floods;
mod harness;
mod other_origins;
mod several_prompts;
mod streaming;
mod surface;
mod tools;
