//! The false driver as a program sees it: every rule has a program that breaks it, which is found, and a mended twin, which is not.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on must stop")]

mod captures;
mod errors;
mod kernels;
mod legacy_stream;
mod memory;
mod order;
mod outside;
mod processes;
mod support;
