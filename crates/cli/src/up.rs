//! `baton up`: a cluster on this machine, from nothing to a ready URL, until Ctrl-C drains it.

pub(crate) mod log_line;
mod ready_watch;
mod report;
pub(crate) mod run_folder;

use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use coordinator::SloConfig;
use coordinator::keys::file::KeyFile;

use crate::exit::{Exit, ExitError, WithExit};
use crate::local_cluster::{
    ClusterEvent, ClusterSettings, LocalCluster, LocalClusterError, LocalClusterOptions, LocalMembership, NodeExit,
    Observer, Refused,
};
use crate::model::progress::Progress;
use crate::model::{resolve, with_exit};
use crate::signals::{Signals, Stop};
use crate::terminal::{Terminal, say};
use crate::topology::Topology;
use run_folder::{LOG_BYTES_MAX, RunFolder};

/// The time between two lines that say what is still missing.
const STILL_WAITING_EVERY: Duration = Duration::from_secs(5);
/// After a node died the others have nothing to finish for it.
const GRACE_AFTER_FAILURE: Duration = Duration::from_secs(5);
/// The coordinator gives requests up by itself at the end of the drain. Then it still has to close its streams.
const EXIT_AFTER_DRAIN: Duration = Duration::from_secs(3);

const EXAMPLES: &str = "\
Examples:
  baton up                                   one prefill and one decode node, smollm2-135m, port 8000
  baton up --topology 2p2d --threads-per-node 1
  baton up --topology 2c                     two co-located nodes, to compare with
  baton up --membership etcd --coordinators 2  as on several machines, with an etcd of its own
  baton up --model ./my.gguf --listen 127.0.0.1:0 --json
  baton up --model ./my-folder --served-model-name mine,org/other-name
  baton up --model org/name:Q4_K_M           from the Hugging Face hub, or its cache on this machine
  baton up --devices cuda:0,cuda:1           a GPU for each node; not run on hardware yet, see baton doctor --gpu
  BATON_LAST_CHUNK_TOKENS=0 baton up         any setting of a process: BATON_<KEY> in the environment
  BATON_SHARED_WEIGHTS= baton up             weights in each node, not once for all of them
  BATON_SHM_DIRECT_SECRET= baton up          KV through a checked ring, not written in place";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct UpArgs {
    /// So many prefill and decode nodes (1p1d, 2p4d), or so many co-located nodes, each of which does both (2c).
    #[arg(long, default_value = "1p1d", value_name = "NpMd|Nc")]
    pub topology: Topology,
    /// The path of a GGUF file (the first part of a split one) or of a Hugging Face folder; a name that `baton model list`
    /// knows; or a name on the Hugging Face hub: org/name, org/name@REVISION, org/name:FILE.gguf, org/name:Q4_K_M. Models with
    /// names are fetched when they are not on this machine.
    #[arg(long, default_value = "smollm2-135m", value_name = "PATH|NAME")]
    pub model: String,
    /// Where the API listens; port 0 takes any free one.
    #[arg(long, default_value = "127.0.0.1:8000", value_name = "HOST:PORT")]
    pub listen: String,
    /// How the processes find each other: embedded, etcd (starts one, if it is installed), or etcds://HOST:PORT/CLUSTER.
    #[arg(long, default_value = "embedded", value_name = "embedded|etcd|ETCD")]
    pub membership: LocalMembership,
    /// Coordinators over the same nodes; the first listens at --listen, the others at any free port.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8))]
    pub coordinators: u32,
    /// File of the clients' API keys, which `baton keys` writes [default: nobody is asked for a key].
    #[arg(long, value_name = "FILE")]
    pub api_keys: Option<PathBuf>,
    #[command(flatten)]
    pub settings: ClusterSettings,
    /// Write each process's log to DIR/NAME.log, without a limit. The one of the run before becomes NAME.log.1 [default: 16 MiB of
    /// each where `baton logs` finds them, until the cluster has ended well].
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// Do not show the processes' log lines (their last ones are still shown when one dies).
    #[arg(long)]
    pub quiet: bool,
    /// When ready, print one JSON object on stdout instead of text.
    #[arg(long)]
    pub json: bool,
    /// Seconds from start to ready before giving up.
    #[arg(long, default_value_t = 120, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub start_timeout: u64,
    /// Seconds that running requests get to finish on Ctrl-C or SIGTERM.
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(0..=3600))]
    pub drain_timeout: u64,
}

pub fn run(args: UpArgs) -> anyhow::Result<Exit> {
    check_listen(&args.listen)?;
    check_devices(args.settings.devices.len(), args.topology)?;
    if let Some(file) = &args.settings.slo_config {
        SloConfig::load(file).context("--slo-config").exit(Exit::Usage)?;
    }
    if let Some(file) = &args.api_keys {
        KeyFile::load(file).context("--api-keys").exit(Exit::Usage)?;
    }
    let executable = std::env::current_exe().context("cannot find this program's own file to start the nodes from")?;
    let mut options = cluster_options(&args, executable);
    let refused = |refused: Refused| ExitError::new(refused.exit(), refused.into());
    // A model may take minutes to fetch. What is wrong with the settings is said before.
    options.check_settings().map_err(refused)?;
    let model = resolve(&args.model).map_err(with_exit)?;
    options.model = model.path;
    // Without a name here each process takes the name of the file or folder.
    if options.settings.served_model_name.is_empty() {
        options.settings.served_model_name.extend(model.name);
    }
    for note in options.check_model().map_err(refused)? {
        say!("{note}");
    }
    options.check_memory().with_context(|| {
        format!(
            "{} of {} does not fit this machine",
            args.topology,
            options.model.display()
        )
    })?;
    if let Some(dir) = &args.log_dir {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make the log folder {}", dir.display()))?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // This runtime only reads pipes and waits. The cores belong to the nodes.
        .worker_threads(1)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(up(args, options))
}

/// Everything but the path of the model, which may have to be fetched.
fn cluster_options(args: &UpArgs, executable: PathBuf) -> LocalClusterOptions {
    let mut options = LocalClusterOptions::new(executable, args.topology, PathBuf::from(&args.model));
    options.listen = args.listen.clone();
    options.membership = args.membership.clone();
    options.coordinator_count = args.coordinators;
    options.settings = args.settings.clone();
    options.settings.threads_per_node.get_or_insert_with(available_cores);
    let drain_ms_max = args.drain_timeout * 1000;
    options
        .coordinator_flags
        .push(format!("--drain-ms-max={drain_ms_max}").into());
    if let Some(file) = &args.api_keys {
        let mut flag = OsString::from("--api-keys=");
        flag.push(file);
        options.coordinator_flags.push(flag);
    }
    options.start_within = Duration::from_secs(args.start_timeout);
    options
}

/// Without the folder everything works but `baton logs`.
fn folder_of_this_run(log_dir: Option<&Path>) -> Option<RunFolder> {
    RunFolder::create(&run_folder::parent()?, log_dir)
        .inspect_err(|error| say!("`baton logs` will not find this cluster, whose folder cannot be made: {error}"))
        .ok()
}

/// A device for all nodes, or one for each.
fn check_devices(devices: usize, topology: Topology) -> anyhow::Result<()> {
    let nodes = topology.node_count() as usize;
    match devices {
        0 | 1 => Ok(()),
        _ if devices == nodes => Ok(()),
        _ => Err(anyhow::anyhow!(
            "--devices names {devices} devices for the {nodes} nodes of {topology}: write one for all, or one for each"
        ))
        .exit(Exit::Usage),
    }
}

/// Reports at once an address that the coordinator could not use.
fn check_listen(listen: &str) -> anyhow::Result<()> {
    match TcpListener::bind(listen) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Err(error).with_context(|| {
            format!(
                "{listen} is in use, perhaps by another `baton up`; give another with --listen, such as 127.0.0.1:0"
            )
        }),
        Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => Err(error)
            .with_context(|| format!("--listen {listen}: write HOST:PORT, such as 127.0.0.1:8000"))
            .exit(Exit::Usage),
        Err(error) => {
            Err(error).with_context(|| format!("cannot listen on {listen}; give another address with --listen"))
        }
    }
}

async fn up(args: UpArgs, mut options: LocalClusterOptions) -> anyhow::Result<Exit> {
    let mut folder = folder_of_this_run(args.log_dir.as_deref());
    options.log_bytes_max = args.log_dir.is_none().then_some(LOG_BYTES_MAX);
    options.log_dir = folder.as_ref().map(|folder| folder.logs().to_owned());
    if options.log_dir.is_none() {
        options.log_dir.clone_from(&args.log_dir);
    }
    let outcome = until_it_ends(&args, options, folder.as_mut()).await;
    match (&outcome, folder) {
        (Ok(_), Some(folder)) => folder.remove(),
        // It failed before any process was started.
        (Err(_), Some(folder)) if !folder.has_logs() => folder.remove(),
        (Err(_), Some(folder)) => say!("the processes' logs are in {}: baton logs", folder.logs().display()),
        (_, None) => {}
    }
    outcome
}

async fn until_it_ends(
    args: &UpArgs,
    mut options: LocalClusterOptions,
    folder: Option<&mut RunFolder>,
) -> anyhow::Result<Exit> {
    let terminal = Terminal::stderr();
    let mut signals = Signals::install().context("cannot listen for Ctrl-C")?;
    let started = Instant::now();
    options.observer = observer(terminal, started, args.quiet);
    let settings = options.settings.clone();
    let first_name = settings.served_model_name.first().cloned();
    let model = first_name.unwrap_or_else(|| model_files::name::of(&options.model));

    say!("baton up: {} from {}", args.topology, options.model.display());
    let cluster = tokio::select! {
        cluster = LocalCluster::start(options) => cluster,
        stop = signals.next() => {
            say!("interrupted while starting: stopping at once");
            return Ok(stop.exit());
        }
        never = say_still_waiting(started) => match never {},
    };
    let mut cluster = match cluster {
        Ok(cluster) => cluster,
        Err(error) => return Err(did_not_start(error)),
    };
    let ready = report::Ready::collect(&cluster, &settings, model).await?;
    if let Some(folder) = folder {
        // Its logs are found without the URL, unless several clusters run.
        let _ = folder.is_ready_at(cluster.base_url());
    }
    ready.print(args.json)?;
    let elapsed = started.elapsed().as_secs_f64();
    say!(
        "{}",
        terminal.bold(&format!(
            "ready in {elapsed:.1} s; Ctrl-C drains and stops, twice stops at once"
        ))
    );

    let mut watch = ready_watch::ReadyWatch::new(cluster.client()?, cluster.base_url());
    let stop = loop {
        tokio::select! {
            words = watch.next_change() => say!("now {words}"),
            exit = cluster.next_exit() => match exit.has_left() {
                true => say!("{} has left after its drain; the others go on", exit.name),
                false => return Err(after_failure(&cluster, &exit).await),
            },
            stop = signals.next() => break stop,
        }
    };
    drain(&cluster, &mut signals, stop, Duration::from_secs(args.drain_timeout)).await
}

async fn drain(cluster: &LocalCluster, signals: &mut Signals, stop: Stop, grace: Duration) -> anyhow::Result<Exit> {
    say!(
        "draining: running requests get {} s; Ctrl-C again stops at once",
        grace.as_secs()
    );
    tokio::select! {
        killed = cluster.stop(grace + EXIT_AFTER_DRAIN) => {
            let mut wrong = Vec::new();
            if !killed.is_empty() {
                wrong.push(format!("not drained within {} s, killed: {}", grace.as_secs(), killed.join(", ")));
            }
            // It may be why the others did not end.
            wrong.extend(cluster.first_bad_end().map(|exit| format!("a process did not end well: {exit}")));
            ensure!(wrong.is_empty(), "{}", wrong.join("; "));
            say!("stopped; no process is left");
            Ok(stop.exit())
        }
        _ = signals.next() => {
            cluster.stop(Duration::ZERO).await;
            cut_short(cluster.first_bad_end())
        }
    }
}

/// How a drain ends that was cut short. The status is that of Ctrl-C, also when a process had ended badly before: an error names it, and
/// keeps the logs.
fn cut_short(bad_end: Option<NodeExit>) -> anyhow::Result<Exit> {
    match bad_end {
        None => {
            say!("stopped at once");
            Ok(Exit::Interrupted)
        }
        Some(exit) => Err(anyhow::anyhow!(
            "stopped at once; before that, a process did not end well: {exit}"
        ))
        .exit(Exit::Interrupted),
    }
}

/// This program made the command line that a process refused.
fn did_not_start(error: LocalClusterError) -> anyhow::Error {
    let is_usage = matches!(&error, LocalClusterError::Exited(exit) if exit.status.code() == Some(Exit::Usage as i32));
    let error = anyhow::Error::new(error).context("the cluster did not start");
    if !is_usage {
        return error;
    }
    anyhow::Error::new(ExitError::new(Exit::Usage, error))
}

async fn after_failure(cluster: &LocalCluster, exit: &NodeExit) -> anyhow::Error {
    let error = anyhow::anyhow!("{exit}");
    cluster.stop(GRACE_AFTER_FAILURE).await;
    error.context("a process died, the others were stopped")
}

fn available_cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX))
}

async fn say_still_waiting(started: Instant) -> std::convert::Infallible {
    loop {
        tokio::time::sleep(STILL_WAITING_EVERY).await;
        say!("{:6.1} s  still starting", started.elapsed().as_secs_f64());
    }
}

/// Shows the events of the start, and the processes' own lines behind their names.
fn observer(terminal: Terminal, started: Instant, is_quiet: bool) -> Observer {
    // Nodes that share their weights pack them once, so one bar is enough. Without a terminal the node's log has it.
    let bar = Mutex::new(None::<Progress>);
    Observer::new(move |event| {
        let at = started.elapsed().as_secs_f64();
        match event {
            ClusterEvent::EtcdStarted { address, pid } => say!("{at:6.1} s  etcd: answers on {address}, pid {pid}"),
            ClusterEvent::Started { name, kind, pid } => say!("{at:6.1} s  {name}: started as {kind}, pid {pid}"),
            ClusterEvent::Packing { .. } if !std::io::stderr().is_terminal() => {}
            ClusterEvent::Packing {
                done_bytes,
                total_bytes,
                ..
            } => {
                let mut bar = bar.lock().unwrap_or_else(PoisonError::into_inner);
                let start = || Progress::start("packing the weights", Some(*total_bytes), false);
                bar.get_or_insert_with(start).at(*done_bytes);
                if done_bytes >= total_bytes {
                    *bar = None;
                }
            }
            ClusterEvent::Listening { name, address } => say!("{at:6.1} s  {name}: listens on {address}"),
            ClusterEvent::Waiting { what } => say!("{at:6.1} s  waiting: {what}"),
            ClusterEvent::Ready { name } => say!("{at:6.1} s  {name}: ready"),
            ClusterEvent::Line { .. } if is_quiet => {}
            ClusterEvent::Line { name, line } => {
                let line = log_line::for_people(line, terminal);
                say!("{} {line}", terminal.name(&format!("{name:>11} |")));
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    use super::*;
    use crate::local_cluster::ProcessKind;

    #[test]
    fn a_drain_that_is_cut_short_names_the_process_that_had_crashed() {
        assert!(matches!(cut_short(None), Ok(Exit::Interrupted)));
        let crashed = NodeExit {
            name: "decode-0".to_owned(),
            kind: ProcessKind::Decode,
            pid: 1,
            // The kernel's form of a signal: SIGABRT.
            status: ExitStatus::from_raw(6),
            is_killed: false,
            last_lines: Vec::new(),
        };
        // `up` keeps the logs of a cluster that ends with an error.
        let error = cut_short(Some(crashed)).expect_err("a process has crashed");
        assert_eq!(crate::exit::of(&error), Exit::Interrupted);
        assert!(error.to_string().contains("decode-0"), "{error}");
    }

    #[test]
    fn a_port_in_use_and_a_word_that_is_no_address_are_told_apart() {
        let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = taken.local_addr().expect("its address").to_string();
        let error = check_listen(&address).expect_err("it is taken");
        assert_eq!(crate::exit::of(&error), Exit::Failure);
        let error = check_listen("here").expect_err("no port");
        assert_eq!(crate::exit::of(&error), Exit::Usage);
    }
}
