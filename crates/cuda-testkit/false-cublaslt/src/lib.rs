//! Owns a `libcublasLt.so.13` for tests: the functions that an engine needs, with their rules for attributes, layouts and workspaces.
//! A product is work of the false driver's stream, so races on its matrices and on its workspace are seen.
//! It never says how fast or how exact the real library is: it sums in f32, in plain order, and offers one algorithm for each product.
//! Refused: every epilogue but the default, scales and pointers on the device, types but f32, f16 and bf16, other compute types.
//! Read first: `attributes.rs` (what can be set), `product.rs` (what is a valid product), `arithmetic.rs`.

#![allow(non_snake_case, reason = "the library and its functions have NVIDIA's names")]
#![allow(
    clippy::missing_safety_doc,
    reason = "each function has the contract of NVIDIA's function of its name"
)]

mod arithmetic;
mod attributes;
mod exported;
mod product;
mod status;

#[allow(dead_code, reason = "each of the three libraries uses its own part")]
#[path = "../../false-cuda/src/outside_abi.rs"]
mod outside_abi;

pub use exported::*;
