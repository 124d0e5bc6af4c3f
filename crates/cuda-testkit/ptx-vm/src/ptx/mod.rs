//! PTX text to kernels.

mod body;
mod decode;
mod error;
mod image;
mod integers;
mod kernel;
mod module;
mod names;
mod operands;
mod statements;

pub use error::{ParseError, Refusal};
pub use kernel::{Kernel, Param};
pub use module::Module;
