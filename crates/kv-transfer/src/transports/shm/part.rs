//! The end of a direct pair at the decode node: the pair is not over before its sender can write no block any more.

use std::time::Duration;

use bytes::BytesMut;
use futures::StreamExt as _;
use prost::Message as _;
use proto::messages::StagedFrame;
use proto::v1;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::OwnedReadHalf;
use tokio_util::codec::{FramedRead, LengthDelimitedCodec};

use super::peer_process::PeerProcess;

pub(super) type Frames = FramedRead<OwnedReadHalf, LengthDelimitedCodec>;

/// A sender that takes longer is logged, because it keeps blocks out of use.
const SAID_AFTER: Duration = Duration::from_secs(5);

/// Waits for the sender's goodbye or the exit of its process, whichever comes first. This side's half of the socket is
/// closed, so a sender that runs knows it. The wait has no limit, on purpose: a paused sender may go on with a store at any
/// time (PROTOCOL rule 11), and its blocks stay in quarantine for as long.
pub(super) async fn parted(mut frames: Frames, writer: &PeerProcess) {
    let parting = async {
        tokio::select! {
            () = writer.exited() => {}
            () = goodbye(&mut frames) => {}
        }
    };
    tokio::pin!(parting);
    if tokio::time::timeout(SAID_AFTER, &mut parting).await.is_err() {
        tracing::warn!("a sender is neither gone nor says goodbye: the blocks it was given stay in quarantine");
        parting.await;
    }
}

/// Waits for ever when none comes. Then the exit decides.
async fn goodbye(frames: &mut Frames) {
    while let Some(message) = frames.next().await {
        match message {
            Ok(message) if is_goodbye(&message) => return,
            // Other messages that were on their way do not matter any more.
            Ok(_) => {}
            // From here on messages cannot be told apart. Reading goes on, so that the sender does not block.
            Err(_) => break,
        }
    }
    let mut rest = [0; 4096];
    while matches!(frames.get_mut().read(&mut rest).await, Ok(read) if read > 0) {}
    std::future::pending().await
}

fn is_goodbye(message: &BytesMut) -> bool {
    let frame = v1::StagedFrame::decode(&message[..]);
    matches!(frame.map(StagedFrame::try_from), Ok(Ok(StagedFrame::Goodbye)))
}
