//! What the flight recorder itself computes: the events of a record are given to the core again, in turns alone and with the
//! encoder, the frames and their checksums. The rest of its cost is one write to a file for each batch.
//!
//! `cargo run --release -p workload --example flight_record_cost -- FILE [rounds] [CPU seconds of the coordinator in that record]`

#![forbid(unsafe_code)]

use std::error::Error;
use std::fs::File;
use std::hint::black_box;
use std::io::BufReader;
use std::time::{Duration, Instant};

use serving_core::cluster::{Cluster, ClusterConfig};
use workload::flight_record::{Entry, EntryEncoder, Reader, RecordedEvent, frame_of};

/// As the coordinator's recorder.
const BATCH_BYTES: usize = 64 << 10;

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let path = words.next().ok_or("give a flight record")?;
    let rounds: usize = words.next().map_or(Ok(21), |word| word.parse())?;
    let coordinator_seconds: Option<f64> = words.next().map(|word| word.parse()).transpose()?;
    let mut reader = Reader::open(BufReader::new(File::open(path)?))?;
    let config = reader.header().config.clone();
    let mut events = Vec::new();
    while let Some(entry) = reader.next_entry()? {
        if let Entry::Event(event) = entry {
            events.push(*event);
        }
    }
    let (mut alone, mut recorded, mut bytes) = (Vec::new(), Vec::new(), 0);
    for round in 0..rounds {
        // The order changes from round to round.
        for is_recorded in [round % 2 == 0, round % 2 == 1] {
            let (took, written) = run(&config, &events, is_recorded);
            if is_recorded {
                recorded.push(took);
                bytes = written;
            } else {
                alone.push(took);
            }
        }
    }
    let count = events.len().max(1) as f64;
    let (alone, recorded) = (median(alone), median(recorded));
    let difference = recorded.as_secs_f64() - alone.as_secs_f64();
    println!(
        "{} events, {rounds} rounds in turns, medians: core {:.0} ns an event, with the recorder {:.0} ns: {:.0} ns and {:.0} bytes an event",
        events.len(),
        alone.as_secs_f64() * 1e9 / count,
        recorded.as_secs_f64() * 1e9 / count,
        difference * 1e9 / count,
        bytes as f64 / count
    );
    if let Some(seconds) = coordinator_seconds {
        println!(
            "{:.1} ms of the coordinator's {seconds:.2} s of CPU: {:.2} %",
            difference * 1e3,
            100.0 * difference / seconds
        );
    }
    Ok(())
}

/// Time of one pass, and the bytes that would be written.
fn run(config: &ClusterConfig, events: &[RecordedEvent], is_recorded: bool) -> (Duration, usize) {
    let mut cluster = Cluster::new(config.clone());
    let mut encoder = EntryEncoder::default();
    let mut bytes = 0;
    let began = Instant::now();
    for recorded in events {
        let (event, keys) = (recorded.event.clone(), recorded.keys.clone());
        if is_recorded {
            encoder.begin(recorded.at, &event);
        }
        let actions = cluster.apply_again(recorded.at, event, keys);
        if is_recorded {
            let kept = encoder.finish(cluster.looked_up(), &actions);
            kept.expect("it was in a record before");
            if encoder.waiting_bytes() >= BATCH_BYTES {
                bytes += black_box(frame_of(&encoder.take())).len();
            }
        }
        black_box(actions);
    }
    bytes += black_box(frame_of(&encoder.take())).len();
    (began.elapsed(), bytes)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}
