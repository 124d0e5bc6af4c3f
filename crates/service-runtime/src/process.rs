//! The life of a process: configuration, runtime, telemetry, signals, run, flush, exit code.

use std::ffi::OsString;
use std::fmt::{Debug, Display};
use std::process::ExitCode;

use serde::Serialize;

use crate::config::{self, Loaded, Program};
use crate::descriptors;
use crate::event_log;
use crate::freed_memory::{self, FreedMemory};
use crate::shutdown::{self, Shutdown};
use crate::spans::flavor::OtelFlavor;
use crate::telemetry::{self, Identity};

/// The facts that every process's config can give.
pub trait ProcessConfig: clap::Args + Serialize + Send + 'static {
    /// `baton-coordinator`, `baton-prefill` or `baton-decode`.
    const SERVICE: &'static str;
    /// The policy for freed memory that suits its buffers.
    const FREED_MEMORY: FreedMemory;
    fn name(&self) -> &str;
    /// The naming conventions of its spans.
    fn otel_flavors(&self) -> &[OtelFlavor];
}

/// Runs a process from its arguments (the first is the program's name) to its exit code: 0 after a clean drain,
/// 1 on failure, 2 on a wrong configuration.
pub fn main<C, F, E>(
    program: Program,
    args: impl IntoIterator<Item = OsString>,
    run: impl FnOnce(C, Shutdown) -> F,
) -> ExitCode
where
    C: ProcessConfig,
    F: Future<Output = Result<(), E>>,
    E: Display + Debug,
{
    freed_memory::set(C::FREED_MEMORY);
    // There is one thread yet.
    descriptors::make_room(descriptors::OF_A_SERVER);
    let Loaded {
        config,
        exit_with_stdin,
        event_log,
        ..
    } = match config::load_args_or_print::<C>(program, args) {
        Ok(loaded) => loaded,
        Err(code) => return code,
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(program, &error),
    };
    let code = runtime.block_on(async {
        let identity = Identity {
            service: C::SERVICE,
            instance: config.name(),
            version: program.version,
            flavors: config.otel_flavors(),
        };
        let telemetry = match telemetry::init(identity) {
            Ok(telemetry) => telemetry,
            Err(error) => return fail(program, &error),
        };
        if let Some(path) = event_log
            && let Err(error) = event_log::open(&path, config.name())
        {
            return fail(program, &error);
        }
        #[cfg(feature = "failpoints")]
        if let Some(folder) = std::env::var_os(crate::failpoints::FOLDER_VARIABLE)
            && let Err(error) = crate::failpoints::serve(std::path::Path::new(&folder), config.name())
        {
            return fail(program, &error);
        }
        let code = match watch(exit_with_stdin) {
            Ok(shutdown) => match run(config, shutdown).await {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => fail(program, &error),
            },
            Err(error) => fail(program, &error),
        };
        telemetry.shutdown().await;
        code
    });
    // Blocking tasks that are stuck in a system call must not keep a drained process alive.
    runtime.shutdown_timeout(std::time::Duration::from_millis(500));
    code
}

fn watch(exit_with_stdin: bool) -> std::io::Result<Shutdown> {
    let shutdown = shutdown::on_signals()?;
    if exit_with_stdin {
        shutdown::on_stdin_end(&shutdown)?;
    }
    Ok(shutdown)
}

fn fail(program: Program, error: &dyn Display) -> ExitCode {
    eprintln!("{}: {error:#}", program.name);
    ExitCode::FAILURE
}
