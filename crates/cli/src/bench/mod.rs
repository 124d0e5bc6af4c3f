//! `baton bench`: measures a server under load, or parts of a cluster on this machine.

pub(crate) mod arguments;
pub mod engine;
pub mod interference;
pub(crate) mod interrupt;
pub mod load;
pub mod matrix;
mod measure;
mod point;
mod server;
pub mod slowest;
pub mod sweep;
pub mod transfer;
pub mod tune;

use clap::{Args, Subcommand};

use crate::exit::Exit;

#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: BenchKind,
}

#[derive(Debug, Subcommand)]
enum BenchKind {
    /// Send load to any OpenAI-compatible server and record when each token came.
    Run(Box<load::RunArgs>),
    /// The same traffic at several loads, and where the SLO stops holding.
    Sweep(Box<sweep::SweepArgs>),
    /// Six shapes of traffic, cold and warm, as a folder of results.
    Matrix(Box<matrix::MatrixArgs>),
    /// What running streams feel of long prompts that arrive.
    Interference(Box<interference::InterferenceArgs>),
    /// The slowest requests, and what made each of them slow.
    Slowest(slowest::SlowestArgs),
    /// Tries the settings of a local cluster, one at a time.
    Tune(Box<tune::TuneArgs>),
    /// How long the engine takes for a step here: the costs that `baton simulate` computes with.
    Engine(engine::EngineArgs),
    /// How fast KV blocks move between two processes of this machine, beside a memcpy and a TCP stream.
    Transfer(transfer::TransferArgs),
}

pub fn run(args: &BenchArgs) -> anyhow::Result<Exit> {
    crate::version::warn_unless_release();
    match &args.what {
        BenchKind::Run(args) => load::verb(args),
        BenchKind::Sweep(args) => sweep::run(args),
        BenchKind::Matrix(args) => matrix::run(args),
        BenchKind::Interference(args) => interference::run(args),
        BenchKind::Slowest(args) => slowest::run(args),
        BenchKind::Tune(args) => tune::run(args),
        BenchKind::Engine(args) => engine::run(args),
        BenchKind::Transfer(args) => transfer::run(args),
    }
}
