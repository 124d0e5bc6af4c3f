//! KV accounting of one node: which block is in which state, who holds it, what the prefix cache knows.

pub mod block_pool;
pub mod block_table;
pub mod prefix;
pub mod prefix_log;
pub mod reservation;

pub use block_pool::{BlockHandle, BlockPool, BlockUse, CacheReset};
pub use block_table::BlockTable;
pub use prefix::ChainLink;
