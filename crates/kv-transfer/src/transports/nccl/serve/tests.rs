//! A sender on a control stream that does not do its part.

use futures::{StreamExt as _, stream};
use identity::Caller;
use proto::messages::{Hello, KvShard, PROTOCOL_VERSION};
use serving_core::ids::TransferId;

use super::super::cuda_library;
use super::*;
use crate::conformance::{
    CommitAnswer, LAYER_BYTES, Recorder, compatibility, empty_ticket, eventually, false_cuda, node, within,
};
use crate::receiver::ReceiveEnd;

/// A stream of these frames that stays open.
fn open(frames: Vec<KvFrame>) -> Streaming<ToDecodeWire> {
    let mut codec = ProstCodec::<ToDecodeWire, ToDecodeWire>::default();
    let messages = frames.into_iter().map(ToDecode::Frame);
    let messages = messages.map(|message| Ok::<_, Status>(ToDecodeWire::from(message)));
    let messages = stream::iter(messages).chain(stream::pending());
    let body = EncodeBody::new_client(codec.encoder(), messages, None, Some(MESSAGE_BYTES_MAX));
    Streaming::new_request(codec.decoder(), body, None, Some(MESSAGE_BYTES_MAX))
}

#[test]
fn the_thread_blocks_of_all_communicators_fit_a_gpu_together() {
    // Multiprocessors of an A100 (NVIDIA A100 data sheet). Each has room for one thread block of NCCL at least.
    const MULTIPROCESSORS: usize = 108;
    let config = NcclConfig::new(LAYER_BYTES, true);
    assert!(config.communicators_max * cuda_library::THREAD_BLOCKS_MAX as usize <= MULTIPROCESSORS);
}

#[tokio::test]
async fn a_sender_that_reads_no_replies_is_given_up() {
    let (prefill, decode) = (node("prefill-0", 11), node("decode-0", 22));
    let sink = Recorder::new(CommitAnswer::Accept);
    let receiver = Receiver::new(decode.clone(), compatibility(1), sink.clone());
    let ticket = empty_ticket(decode.clone(), "");
    sink.reserve(ticket.transfer, &prefill, &ticket);
    let hello = KvFrame::Hello(Hello {
        from: prefill,
        to: decode,
        protocol_version: PROTOCOL_VERSION,
        compatibility: compatibility(1),
        shard: KvShard::WHOLE,
    });
    let begin = KvFrame::Begin {
        transfer: ticket.transfer,
    };
    let abort = KvFrame::Abort {
        transfer: TransferId(77),
        reason: "a test".to_owned(),
    };
    let kv = false_cuda::pool(1);
    // Room for the answer to the hello.
    let (replies, _unread) = mpsc::channel(1);
    let receiving = Receiving {
        pair: IncomingPair::new(&receiver, KIND, Caller::PlainText),
        end: Parts {
            config: NcclConfig::new(LAYER_BYTES, true),
            library: cuda_library::open(&kv).unwrap(),
            rings: Rings::new(kv),
            room: Arc::new(Semaphore::new(1)),
            stop: CancellationToken::new(),
            closed: CancellationToken::new(),
        },
        replies,
        waiting: VecDeque::new(),
        greeting: Greeting::Awaited,
        communicator: None,
        arriving: None,
    };
    let running = receiving.run(open(vec![hello, begin, abort]));
    within("the end of the stream", running).await;
    eventually("its transfer ends", || {
        sink.ends() == [(ticket.transfer, ReceiveEnd::PairLost)]
    })
    .await;
}
