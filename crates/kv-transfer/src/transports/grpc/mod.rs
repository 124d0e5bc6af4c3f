//! KV over gRPC: one long-lived `Push` stream per pair with many transfers at once. It works everywhere. The two nodes of a
//! pair also meet here before they use another transport.

pub(super) mod connect;
pub(in crate::transports) mod receiver;

use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
pub use receiver::{add_to_routes, routes};
use serving_core::ids::BlockId;

use super::Means;
use crate::choice::TransportKind;
use crate::frame::FRAME_DATA_BYTES_MAX;
use crate::link::budget::Share;
use crate::link::{Carrier, Dial, KvTransport, Link, NoLink, Place};

pub const KIND: TransportKind = TransportKind::new("grpc");

#[derive(Debug)]
struct Grpc;

pub(super) fn transport(_: &Means<'_>) -> Arc<dyn KvTransport> {
    Arc::new(Grpc)
}

#[async_trait]
impl KvTransport for Grpc {
    fn kind(&self) -> TransportKind {
        KIND
    }

    async fn connect(&self, dial: &Dial<'_>) -> Result<Link, NoLink> {
        connect::connect(dial).await.map_err(NoLink::Pair)
    }
}

/// The bytes are in the frames, whose memory is this pair's share of the node's budget.
#[derive(Debug)]
struct InFrames(Share);

#[async_trait]
impl Carrier for InFrames {
    fn kind(&self) -> TransportKind {
        KIND
    }

    fn holds_memory(&self) -> bool {
        false
    }

    fn data_bytes_max(&self) -> usize {
        FRAME_DATA_BYTES_MAX
    }

    async fn room(&self, _: (BlockId, Range<u32>), bytes: usize) -> Box<dyn Place> {
        Box::new(self.0.take(bytes).await)
    }
}

#[cfg(test)]
mod conformance_tests;
