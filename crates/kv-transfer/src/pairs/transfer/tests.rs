//! Transfers whose stream goes a moment before the pair's keeper knows: the decode node has died.

use futures::StreamExt as _;
use proto::messages::HelloReply;
use tokio::sync::mpsc;

use super::*;
use crate::conformance::{Pattern, empty_ticket, first_tokens, node, start, within};
use crate::link::budget::{Budget, Share};
use crate::link::queue::Outbox;
use crate::link::{Carrier, Link};

/// Frames that go nowhere.
#[derive(Debug)]
struct Nowhere(Share);

#[async_trait]
impl Carrier for Nowhere {
    fn kind(&self) -> TransportKind {
        crate::grpc::KIND
    }

    fn data_bytes_max(&self) -> usize {
        frame::FRAME_DATA_BYTES_MAX
    }

    async fn room(&self, _: (BlockId, Range<u32>), bytes: usize) -> Box<dyn Place> {
        Box::new(self.0.take(bytes).await)
    }
}

/// A pair, and the queue from which its transport would write.
fn pair() -> (Arc<PairStream>, mpsc::Receiver<Queued>) {
    let (decode, (outbox, queue)) = (node("decode-0", 22), Outbox::new());
    let link = Link {
        carrier: Arc::new(Nowhere(Share::of(&Budget::of(0)))),
        hello: HelloReply {
            node: decode.clone(),
            refused: None,
            offers: Vec::new(),
        },
        outbox,
        replies: futures::stream::pending().boxed(),
        lesser_because: None,
    };
    let (live, _) = PairStream::new(decode, link);
    (live, queue)
}

fn died() -> PairFault {
    PairFault::Broken("connection reset by peer".to_owned())
}

/// The writer meets the end of the connection first, the keeper later.
fn dies(live: &Arc<PairStream>, queue: mpsc::Receiver<Queued>) {
    drop(queue);
    let live = live.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(50)).await;
        live.close(died());
    });
}

async fn begin(live: &Arc<PairStream>) -> Result<PairTransfer, TransferError> {
    let ticket = empty_ticket(node("decode-0", 22), "");
    within(
        "begin",
        PairTransfer::begin(live.clone(), start(&ticket, Arc::new(Pattern))),
    )
    .await
}

fn fault(error: TransferError) -> PairFault {
    match error {
        TransferError::PairLost { fault, .. } => fault,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_stream_that_takes_no_frame_is_lost_for_the_reason_that_its_keeper_finds() {
    let (live, queue) = pair();
    dies(&live, queue);
    assert_eq!(fault(begin(&live).await.unwrap_err()), died());
}

#[tokio::test]
async fn a_frame_that_is_taken_and_never_written_is_lost_for_the_reason_that_the_keeper_finds() {
    let (live, mut queue) = pair();
    let mut transfer = begin(&live).await.unwrap();
    let dying = tokio::spawn(async move {
        // The begin and the last.
        for _ in 0..2 {
            drop(queue.recv().await);
        }
        dies(&live, queue);
    });
    let error = within("last", transfer.last(first_tokens())).await.unwrap_err();
    assert_eq!(fault(error), died());
    within("the writer", dying).await.unwrap();
}
