//! The answer to an order about the prefix cache.

use serving_core::kv::CacheReset;

use crate::v1;

impl From<CacheReset> for v1::ResetPrefixCacheReply {
    fn from(reset: CacheReset) -> Self {
        Self {
            dropped_blocks: reset.dropped_blocks,
            kept_blocks: reset.kept_blocks,
        }
    }
}

impl From<v1::ResetPrefixCacheReply> for CacheReset {
    fn from(reply: v1::ResetPrefixCacheReply) -> Self {
        Self {
            dropped_blocks: reply.dropped_blocks,
            kept_blocks: reply.kept_blocks,
        }
    }
}
