//! `baton bench transfer`: moves the same blocks between the same two processes in each way, in turn, round by round.

mod memory;
pub mod peer;
mod report;
mod sender;
mod yardsticks;

use std::time::Duration;

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use service_runtime::freed_memory::{self, FreedMemory};

use crate::exit::Exit;
use memory::Payload;
use peer::Peer;
use report::{Report, Row};
use sender::Sender;
use yardsticks::{Iperf3, Yardsticks};

const EXAMPLES: &str = "\
Examples:
  baton bench transfer
  baton bench transfer --rounds 50 --blocks 32 --json
  baton bench transfer --ways grpc --rounds 100";

#[derive(Clone, Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct TransferArgs {
    /// Rounds that count; each round measures every way. One more round goes first to connect and to touch memory.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    #[command(flatten)]
    payload: Payload,
    /// Measure only these ways, with the yardsticks.
    #[arg(long, value_enum, value_delimiter = ',')]
    ways: Vec<Way>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// A way to move the blocks, in the order of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Way {
    #[value(skip)]
    Memcpy,
    DirectUnchecked,
    Direct,
    Staged,
    Grpc,
    GrpcTls,
    #[value(skip)]
    TcpStream,
}

impl Way {
    const ALL: [Way; 7] = [
        Way::Memcpy,
        Way::DirectUnchecked,
        Way::Direct,
        Way::Staged,
        Way::Grpc,
        Way::GrpcTls,
        Way::TcpStream,
    ];

    /// The transports; the other ways are yardsticks.
    fn is_transport(self) -> bool {
        !matches!(self, Way::Memcpy | Way::TcpStream)
    }

    fn name(self) -> &'static str {
        match self {
            Way::Memcpy => "two-process memcpy",
            Way::DirectUnchecked => "shm direct, checksums off",
            Way::Direct => "shm direct",
            Way::Staged => "shm staged",
            Way::Grpc => "grpc",
            Way::GrpcTls => "grpc with TLS",
            Way::TcpStream => "one TCP stream",
        }
    }

    /// What the sender, the kernel and the receiver do with each byte. The slowest of them is the limit.
    fn limit(self) -> &'static str {
        match self {
            Way::Memcpy => "one copy by one thread",
            Way::DirectUnchecked => "the same copy, and a message per block",
            Way::Direct => "sender: a copy and a sum by one thread; receiver: a sum",
            Way::Staged => "receiver: a copy, a sum and a copy by one thread",
            Way::Grpc => "both: copies, a sum, and the kernel's TCP copies",
            Way::GrpcTls => "the same, and both: encryption",
            Way::TcpStream => "the kernel's TCP copies",
        }
    }
}

/// Runs the whole measurement.
pub fn run(args: &TransferArgs) -> anyhow::Result<Exit> {
    // The nodes set this too, here and in the other process.
    freed_memory::set(FreedMemory::Kept);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let report = runtime.block_on(measure(args))?;
    // Tasks that the transports leave running must not delay the result.
    runtime.shutdown_timeout(Duration::from_secs(1));
    report.print(args.json)?;
    Ok(Exit::Ok)
}

async fn measure(args: &TransferArgs) -> anyhow::Result<Report> {
    let source = memory::source(args.payload)?;
    let mut peer = Peer::start(args.payload).await?;
    let mut sender = Sender::new(source.clone(), args.payload, &peer)?;
    let yardsticks = Yardsticks::open(source.clone(), args.payload, &peer)?;
    let is_wanted = |way: &Way| args.ways.is_empty() || !way.is_transport() || args.ways.contains(way);
    let ways: Vec<Way> = Way::ALL.into_iter().filter(is_wanted).collect();
    let mut rows: Vec<Row> = ways.iter().map(|way| Row::new(*way, args.payload.bytes())).collect();
    let mut iperf3 = Iperf3::default();
    for round in 0..=args.rounds {
        // At the start, in the middle and at the end.
        if [1, args.rounds.div_ceil(2), args.rounds].contains(&round) {
            iperf3.run().await;
        }
        // All transfers of a round begin before the first one is timed: a node announces a transfer when the prefill
        // starts, at least one chunk before there is a block to send.
        let mut begun = Vec::new();
        for way in ways.iter().copied().filter(|way| way.is_transport()) {
            begun.push(sender.begin(way).await?);
        }
        for row in &mut rows {
            let way = row.way;
            if round == 0 {
                memory::stamp(&source, way as u8)?;
            }
            let (took, bytes) = match way {
                Way::Memcpy => yardsticks.memcpy().await?,
                Way::TcpStream => yardsticks.tcp_stream().await?,
                _ => {
                    let next = begun.iter().position(|begun| begun.way == way);
                    begun.remove(next.context("every transport has begun")?).send().await?
                }
            };
            ensure!(bytes == args.payload.bytes(), "{}: {bytes} bytes moved", way.name());
            match round {
                // The received bytes must be those that were sent, and not those of an earlier way. The bytes of the stream
                // are thrown away.
                0 if way != Way::TcpStream => {
                    let (ours, theirs) = (memory::digest(&source)?, peer.digest().await?);
                    ensure!(ours == theirs, "{}: other bytes arrived than were sent", way.name());
                }
                0 => {}
                _ => row.took.push(took),
            }
        }
    }
    Ok(Report::new(args.payload, (args.rounds, rows), iperf3.rate()))
}
