//! A prefill node's end of every transport.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use engine::KvMemory;
use identity::PeerRole;
use kv_transfer::pairs::{PairConfig, PairTransport};
use kv_transfer::span::SpanMut;
use kv_transfer::transport::{KvSource, PushedBlock, SendTransfer, SourceError, TransferStart, Transport};
use kv_transfer::{DirectWish, grpc, shm, transports};
use serving_core::ids::{BlockId, TransferId};
use serving_core::node::Ticket;

use super::Way;
use super::memory::{COMPATIBILITY, Payload, blocks, key, node};
use super::peer::Peer;

/// Far more than a transfer takes. A pair that hangs must not hang the command.
const TRANSFER_TIME_LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Source(Arc<KvMemory>);

impl KvSource for Source {
    fn layer_count(&self) -> u32 {
        self.0.geometry().layer_count
    }
    fn layer_bytes(&self) -> usize {
        self.0.geometry().layer_bytes()
    }
    fn export(&self, block: BlockId, layers: Range<u32>, out: SpanMut<'_>) -> Result<(), SourceError> {
        let export = || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            Ok(self.0.export_layers(block, layers, out.host()?)?)
        };
        export().map_err(|source| SourceError { block, source })
    }
}

/// One pair for each way, kept over the rounds as a node keeps its pairs.
#[derive(Debug)]
pub(super) struct Sender {
    source: Arc<Source>,
    payload: Payload,
    ways: Vec<(Way, PairTransport, String)>,
    next_transfer: u128,
}

impl Sender {
    pub fn new(memory: Arc<KvMemory>, payload: Payload, peer: &Peer) -> anyhow::Result<Self> {
        let wish = DirectWish {
            secret: peer.secret.clone(),
            layers: payload.layers,
            layer_bytes: u32::try_from(payload.geometry().layer_bytes())?,
        };
        let config = || PairConfig::new(node("prefill-0"), COMPATIBILITY.into());
        let pair = |kind, wish| transports::pairs(config().over(vec![kind]).writing_in_place(wish));
        let identity = peer.certificates.identity(PeerRole::Prefill)?;
        let encrypted = transports::pairs(config().over(vec![grpc::KIND]).known_as(identity));
        let at = &peer.addresses;
        let direct = || pair(shm::KIND, Some(wish.clone()));
        let ways = vec![
            (Way::DirectUnchecked, direct(), at.direct_unchecked.clone()),
            (Way::Direct, direct(), at.direct.clone()),
            (Way::Staged, pair(shm::KIND, None), at.staged.clone()),
            (Way::Grpc, pair(grpc::KIND, None), at.staged.clone()),
            (Way::GrpcTls, encrypted, at.encrypted.clone()),
        ];
        Ok(Self {
            source: Arc::new(Source(memory)),
            payload,
            ways,
            next_transfer: 1,
        })
    }

    /// Announces a transfer to the decode node, as a prefill node does when it starts to compute.
    pub async fn begin(&mut self, way: Way) -> anyhow::Result<Begun> {
        let transfer = TransferId(self.next_transfer);
        self.next_transfer += 1;
        let found = self.ways.iter().find(|(known, ..)| *known == way);
        let (_, transport, address) = found.context("not a way of the transports")?;
        let ticket = Ticket {
            transfer,
            decode_node: node("decode-0"),
            decode_address: address.clone(),
            blocks: blocks(self.payload),
            prefix_blocks: 0,
            total_bytes: self.payload.bytes(),
            expires_in: TRANSFER_TIME_LIMIT,
        };
        let start = TransferStart {
            key: key(transfer),
            ticket,
            source: self.source.clone(),
            traceparent: None,
            cached_tokens: 0,
        };
        let transfer = transport.begin(start).await?;
        let expected = match way {
            Way::Grpc | Way::GrpcTls => grpc::KIND,
            Way::Staged => shm::KIND,
            _ => shm::DIRECT,
        };
        ensure!(
            transfer.transport() == expected,
            "{} fell back to another way",
            way.name()
        );
        Ok(Begun {
            way,
            transfer,
            blocks: self.payload.blocks,
        })
    }
}

/// A transfer whose blocks are ready to go.
#[derive(Debug)]
pub(super) struct Begun {
    pub way: Way,
    transfer: Box<dyn SendTransfer>,
    blocks: u32,
}

impl Begun {
    /// Time and bytes from the first block to the acknowledgement.
    pub async fn send(self) -> anyhow::Result<(Duration, u64)> {
        let way = self.way;
        let sent = tokio::time::timeout(TRANSFER_TIME_LIMIT, self.push_all());
        sent.await.with_context(|| format!("{}: no end in sight", way.name()))?
    }

    async fn push_all(mut self) -> anyhow::Result<(Duration, u64)> {
        let started = Instant::now();
        for index in 0..self.blocks {
            let block = PushedBlock {
                ticket_index: index,
                block: BlockId(index),
            };
            self.transfer.push(block).await?;
        }
        self.transfer.last(Vec::new()).await?;
        let report = self.transfer.acked().await?;
        Ok((started.elapsed(), report.kv_bytes))
    }
}
