//! Faults in frames: a tap sees each frame of a link with its bytes, and what it returns is sent instead.

use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use proto::messages::{KvBlockFrame, KvFrame};
use serving_core::ids::BlockId;
use tokio::sync::mpsc;

use super::{LAYER_BYTES, LAYERS};
use crate::choice::TransportKind;
use crate::link::queue::{Outbox, Queued, QueuedKv};
use crate::link::{Carrier, Copied, Link, NotCopied, Place};
use crate::span::SpanMut;
use crate::transport::{KvSource, SourceError};

type Tap = Arc<Mutex<dyn FnMut(KvFrame) -> Vec<KvFrame> + Send>>;

#[derive(Clone, Default)]
pub(crate) struct Tapping(pub Option<Tap>);

impl Debug for Tapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tapping")
    }
}

impl Tapping {
    pub fn on(&self, link: Link) -> Link {
        let Some(tap) = self.0.clone() else { return link };
        let (Outbox { frames, .. }, queue) = Outbox::new();
        let outbox = link.outbox.clone();
        let pump = Pump {
            tap,
            carrier: link.carrier.clone(),
            outbox: link.outbox,
        };
        tokio::spawn(pump.run(queue));
        Link {
            carrier: Arc::new(Tapped(link.carrier)),
            outbox: Outbox { frames, ..outbox },
            ..link
        }
    }
}

#[derive(Debug)]
struct Tapped(Arc<dyn Carrier>);

#[async_trait]
impl Carrier for Tapped {
    fn kind(&self) -> TransportKind {
        self.0.kind()
    }
    fn writes_in_place(&self) -> bool {
        self.0.writes_in_place()
    }
    fn holds_memory(&self) -> bool {
        self.0.holds_memory()
    }
    fn data_bytes_max(&self) -> usize {
        self.0.data_bytes_max()
    }
    async fn room(&self, target: (BlockId, Range<u32>), bytes: usize) -> Box<dyn Place> {
        let inner = self.0.room(target.clone(), bytes).await;
        let bytes = Bytes::new();
        Box::new(TappedPlace { inner, target, bytes })
    }
}

/// Keeps the bytes that its place got.
#[derive(Debug)]
struct TappedPlace {
    inner: Box<dyn Place>,
    target: (BlockId, Range<u32>),
    bytes: Bytes,
}

impl Place for TappedPlace {
    fn fill(&mut self, from: &Copied<'_>) -> Result<u64, NotCopied> {
        let mut bytes = vec![0; from.bytes];
        from.to(SpanMut::Host(&mut bytes))?;
        self.bytes = bytes.into();
        fill(&mut *self.inner, &self.bytes)
    }
}

fn fill(place: &mut dyn Place, bytes: &Bytes) -> Result<u64, NotCopied> {
    place.fill(&Copied {
        source: &Taken(bytes.clone()),
        block: BlockId(0),
        layers: 0..1,
        bytes: bytes.len(),
    })
}

#[derive(Debug)]
struct Taken(Bytes);

impl KvSource for Taken {
    fn layer_count(&self) -> u32 {
        LAYERS
    }
    fn layer_bytes(&self) -> usize {
        LAYER_BYTES
    }
    fn export(&self, _: BlockId, _: Range<u32>, out: SpanMut<'_>) -> Result<(), SourceError> {
        let out = out.host().expect("no staging was given");
        out.copy_from_slice(&self.0);
        Ok(())
    }
}

/// Between the pair's queue and the transport's.
struct Pump {
    tap: Tap,
    carrier: Arc<dyn Carrier>,
    outbox: Outbox,
}

impl Pump {
    async fn run(self, mut queue: mpsc::Receiver<Queued>) {
        while let Some(queued) = queue.recv().await {
            let written = queued.written;
            let mut passed = self.tapped((queued.frame, queued.kv)).await;
            match (passed.last_mut(), written) {
                (Some(last), written) => last.written = written,
                (None, Some(written)) => _ = written.send(Instant::now()),
                (None, None) => {}
            }
            for queued in passed {
                if self.outbox.frames.send(queued).await.is_err() {
                    return;
                }
            }
        }
    }

    fn pass(&self, frame: KvFrame) -> Vec<KvFrame> {
        (self.tap.lock().unwrap())(frame)
    }

    async fn tapped(&self, (frame, kv): (KvFrame, Option<QueuedKv>)) -> Vec<Queued> {
        let (KvFrame::Block(header), Some(kv)) = (frame.clone(), kv) else {
            return self.pass(frame).into_iter().map(Queued::control).collect();
        };
        let place: &dyn Any = &*kv.place;
        let TappedPlace { target, bytes, .. } = place.downcast_ref().expect("every room is tapped");
        let (target, data, moving) = (target.clone(), bytes.clone(), kv.moving.clone());
        drop(kv);
        let mut passed = Vec::new();
        for frame in self.pass(KvFrame::Block(KvBlockFrame { data, ..header })) {
            let KvFrame::Block(mut block) = frame else {
                passed.push(Queued::control(frame));
                continue;
            };
            let data = std::mem::take(&mut block.data);
            let mut place = self.carrier.room(target.clone(), data.len()).await;
            if fill(&mut *place, &data).is_err() {
                continue;
            }
            block.data = place.inline();
            let kv = QueuedKv::new((place, data.len() as u64), &self.outbox.gauge, moving.clone());
            passed.push(Queued {
                kv: Some(kv),
                ..Queued::control(KvFrame::Block(block))
            });
        }
        passed
    }
}
