//! KV accounting of one node: which block is in which state, who holds it, what the prefix cache knows.

mod block_holds;
pub mod block_pool;
pub mod block_table;
mod cached_blocks;
pub mod prefix;
pub mod prefix_log;
pub mod reservation;

pub use block_holds::{BlockHandle, BlockState, BlockUse};
pub use block_pool::{BlockPool, CacheReset};
pub use block_table::BlockTable;
pub use cached_blocks::CacheEvictions;
pub use prefix::ChainLink;
