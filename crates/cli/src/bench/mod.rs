//! `baton bench`: measures parts of a cluster on this machine.

pub mod engine;
pub mod transfer;

use clap::{Args, Subcommand};

use crate::exit::Exit;

#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: BenchKind,
}

#[derive(Debug, Subcommand)]
enum BenchKind {
    /// How long the engine takes for a step here: the costs that `baton simulate` computes with.
    Engine(engine::EngineArgs),
    /// How fast KV blocks move between two processes of this machine, beside a memcpy and a TCP stream.
    Transfer(transfer::TransferArgs),
}

pub fn run(args: &BenchArgs) -> anyhow::Result<Exit> {
    match &args.what {
        BenchKind::Engine(args) => engine::run(args),
        BenchKind::Transfer(args) => transfer::run(args),
    }
}
