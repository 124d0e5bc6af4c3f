//! `baton version`: what this binary is, for people and for scripts.

use std::io::Write;

use clap::Args;
use serde::Serialize;

use crate::exit::Exit;
use crate::terminal::say;

pub const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(Debug, Args)]
pub struct VersionArgs {
    /// One JSON object instead of one line.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Serialize)]
struct VersionReport {
    name: &'static str,
    version: &'static str,
    /// Null for a local build.
    commit: Option<&'static str>,
    /// `release`, `debug` or `tests`.
    build: &'static str,
    architecture: &'static str,
    os: &'static str,
}

pub fn run(args: &VersionArgs) -> anyhow::Result<Exit> {
    let report = VersionReport {
        name: "baton",
        version: VERSION,
        commit: coordinator::BUILD_COMMIT,
        build: coordinator::BUILD_PROFILE,
        architecture: std::env::consts::ARCH,
        os: std::env::consts::OS,
    };
    let mut out = crate::stdout::stdout();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        writeln!(
            out,
            "baton {VERSION} ({} {}, {} build)",
            report.os, report.architecture, report.build
        )?;
    }
    Ok(Exit::Ok)
}

/// Says that times which this program measures of itself are not those of the program that users have.
pub(crate) fn warn_unless_release() {
    let build = coordinator::BUILD_PROFILE;
    if build != "release" {
        say!(
            "This is a {build} build. Its times say nothing about baton: measure with that of `cargo build --release`."
        );
    }
}
