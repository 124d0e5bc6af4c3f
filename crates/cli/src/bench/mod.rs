//! `baton bench`: measures a server under load, or parts of a cluster on this machine.

pub mod engine;
pub mod load;
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
    /// Send load to a server that speaks OpenAI's interface, and measure when each token comes.
    Run(Box<load::RunArgs>),
    /// How fast KV blocks move between two processes of this machine, beside a memcpy and a TCP stream.
    Transfer(transfer::TransferArgs),
}

pub fn run(args: &BenchArgs) -> anyhow::Result<Exit> {
    match &args.what {
        BenchKind::Engine(args) => engine::run(args),
        BenchKind::Run(args) => load::verb(args),
        BenchKind::Transfer(args) => transfer::run(args),
    }
}
