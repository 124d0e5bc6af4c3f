//! What an engine on a device needs of this crate besides the contract, so that it checks, claims and draws as every other engine.

pub use crate::batch::BatchBounds;
pub use crate::cpu::rope_speeds;
pub use crate::kv_claims::StepClaim;
pub use crate::kv_geometry::check_block_tokens;
pub use crate::memory_need::Bytes;
pub use crate::on_host::Draw;
