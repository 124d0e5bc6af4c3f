//! Tests of the flight recorder: what is in the file when the loop stops, when the file is full, and when the disk is slow.

use std::sync::atomic::Ordering;

use serving_core::ids::{NodeName, RequestId};
use tempfile::TempDir;
use workload::flight_record::{Ending, Reader, ReplayOptions, replay};

use super::*;

fn target(folder: &TempDir, bytes_max: u64) -> FlightRecordTarget {
    FlightRecordTarget {
        path: folder.path().join("flight.record"),
        bytes_max: ByteSize(bytes_max),
    }
}

async fn recorded(target: &FlightRecordTarget, events: u64) -> anyhow::Result<()> {
    let cluster = ClusterConfig::default();
    let (recorder, complete) = FlightRecorder::start(RecordStart {
        target,
        coordinator: "c",
        cluster: cluster.clone(),
    })?;
    let mut brain = RecordedCluster::new(cluster, Some(recorder));
    for event in 0..events {
        let name = NodeName::new("no-such-node");
        let event_now = Time::from_millis(event);
        brain.apply(event_now, ClusterEvent::DrainNode { name, next_role: None });
        if let (0, Some(recorder)) = (event % 50, &mut brain.recorder) {
            recorder.note_delivered(RequestId(1), 7);
        }
    }
    drop(brain);
    complete.await?;
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<workload::flight_record::Replay> {
    Ok(replay(Reader::open(File::open(path)?)?, ReplayOptions::default())?)
}

#[test]
fn a_target_is_a_path_and_perhaps_a_size() {
    let parsed = |text: &str| text.parse::<FlightRecordTarget>();
    let shown = |text: &str| parsed(text).map(|target| target.to_string());
    assert_eq!(shown("a/b").as_deref(), Ok("a/b:256MiB"));
    assert_eq!(shown("a:b:2GiB").as_deref(), Ok("a:b:2GiB"));
    assert_eq!(shown("a:b").as_deref(), Ok("a:b:256MiB"), "a colon of the path's own");
    assert!(parsed("").is_err() && parsed(":1MiB").is_err());
    assert!(parsed("a:1KiB").is_err());
}

#[tokio::test]
async fn what_was_applied_is_in_the_file_when_the_loop_has_stopped_and_the_life_before_is_kept() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let target = target(&folder, 1 << 20);
    recorded(&target, 10).await?;
    recorded(&target, 2_000).await?;
    let replay = read(&target.path)?;
    assert_eq!((replay.events, replay.equal_events), (2_000, 2_000));
    let mark = EndMark {
        reason: EndReason::Stopped,
        lost_events: 0,
    };
    assert_eq!(replay.ending, Some(Ending::Marked(mark)));
    assert_eq!(read(&folder.path().join("flight.record.1"))?.events, 10);
    Ok(())
}

#[tokio::test]
async fn a_full_file_ends_with_the_number_of_events_that_it_lacks() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let target = target(&folder, BYTES_MAX_MIN);
    recorded(&target, 20_000).await?;
    let replay = read(&target.path)?;
    let Some(Ending::Marked(mark)) = replay.ending else {
        panic!("no mark: {replay:?}");
    };
    assert_eq!(replay.events + mark.lost_events, 20_000);
    assert!(mark.lost_events > 0 && replay.events > 0);
    assert!(std::fs::metadata(&target.path)?.len() <= BYTES_MAX_MIN);
    Ok(())
}

/// Nobody takes the batches, as if the disk stood still.
#[test]
fn a_full_queue_ends_the_record_and_counts_what_is_lost() {
    let (to_writer, batches) = sync_channel(1);
    let shared = Arc::new(Shared::default());
    let recorder = FlightRecorder {
        encoder: EntryEncoder::default(),
        to_writer,
        shared: shared.clone(),
        flushed_at: Time::ZERO,
    };
    let mut brain = RecordedCluster::new(ClusterConfig::default(), Some(recorder));
    for second in 1..6 {
        brain.apply(Time::from_millis(1_000 * second), ClusterEvent::Tick);
    }
    assert_eq!(shared.lost_events.load(Ordering::Relaxed), 4);
    let taken: u64 = batches.try_iter().map(|batch| batch.events).sum();
    assert_eq!(taken, 1);
}

#[tokio::test]
async fn a_file_that_is_no_record_is_left_alone() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let target = target(&folder, 1 << 20);
    std::fs::write(&target.path, "a letter to my mother")?;
    assert!(recorded(&target, 1).await.is_err());
    assert_eq!(std::fs::read_to_string(&target.path)?, "a letter to my mother");
    Ok(())
}
