//! An etcd on this machine, started for one `baton up`: loopback, free ports, a temporary data folder.

use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::Instant;

use crate::http;

/// The path of the program, when it is not in `PATH`.
pub const ETCD_VARIABLE: &str = "BATON_ETCD";
/// etcd elects itself within a second. A busy machine may take a few seconds.
const START_LIMIT: Duration = Duration::from_secs(20);
const POLL_EVERY: Duration = Duration::from_millis(50);
/// Another program may take a port that was free before etcd has it.
const STARTS_MAX: usize = 3;

/// Killed when dropped, and by the kernel when this process dies.
#[derive(Debug)]
pub struct LocalEtcd {
    child: Child,
    pub pid: u32,
    /// host:port for clients.
    pub address: String,
    folder: TempDir,
}

impl LocalEtcd {
    /// Starts etcd and waits until it answers. `executable` is this program, which becomes etcd.
    ///
    /// # Errors
    /// No etcd is installed (the error says how to get one), or etcd does not start.
    pub async fn start(executable: &Path) -> anyhow::Result<Self> {
        let program = find()?;
        let mut last = String::new();
        for _ in 0..STARTS_MAX {
            let mut etcd = Self::spawn(executable, &program)?;
            match etcd.ready().await {
                Ok(()) => return Ok(etcd),
                Err(error) => last = format!("{error:#}: {}", etcd.last_words()),
            }
        }
        bail!("{} does not start: {last}", program.display())
    }

    fn spawn(executable: &Path, program: &Path) -> anyhow::Result<Self> {
        let folder = TempDir::with_prefix("baton-etcd-").context("cannot make a folder for etcd's data")?;
        let (client, peer) = (free_port()?, free_port()?);
        let (client_url, peer_url) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
        let log = std::fs::File::create(folder.path().join("log")).context("cannot write etcd's log")?;
        let child = Command::new(executable)
            .arg("serve-etcd")
            .arg(program)
            .arg("--data-dir")
            .arg(folder.path().join("data"))
            .args(["--name=baton".to_owned(), format!("--initial-cluster=baton={peer_url}")])
            .args(["listen", "advertise"].map(|what| format!("--{what}-client-urls={client_url}")))
            .args(["listen", "initial-advertise"].map(|what| format!("--{what}-peer-urls={peer_url}")))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let pid = child.id().context("etcd was gone before it could be watched")?;
        let address = format!("127.0.0.1:{client}");
        Ok(Self {
            child,
            pid,
            address,
            folder,
        })
    }

    async fn ready(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        let url = format!("http://{}/health", self.address);
        let client = http::client(&url, None)?;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                bail!("it ended with {status}");
            }
            let answer = client.get(&url).timeout(Duration::from_secs(1)).send().await;
            if answer.is_ok_and(|answer| answer.status().is_success()) {
                return Ok(());
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
        bail!("it did not answer within {START_LIMIT:?}")
    }

    fn last_words(&self) -> String {
        let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        log.lines().last().unwrap_or("it said nothing").to_owned()
    }
}

/// `$BATON_ETCD`, else `etcd` on the path.
fn find() -> anyhow::Result<PathBuf> {
    if let Some(given) = std::env::var_os(ETCD_VARIABLE).filter(|given| !given.is_empty()) {
        let path = PathBuf::from(given);
        if !path.is_file() {
            bail!("{ETCD_VARIABLE} names {}, which is not a file", path.display());
        }
        return Ok(path);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .map(|folder| folder.join("etcd"))
        .find(|path| path.is_file());
    found.with_context(|| {
        format!(
            "no etcd is installed. Get one (Debian, Ubuntu: apt-get install etcd-server; macOS: brew install etcd; else https://github.com/etcd-io/etcd/releases), or name it in {ETCD_VARIABLE}. From a checkout, on Debian or Ubuntu: scripts/get-etcd target/etcd && export {ETCD_VARIABLE}=$PWD/target/etcd/usr/bin/etcd. To use an etcd that runs already: --membership etcds://HOST:2379/CLUSTER. Without any: --membership embedded, the default"
        )
    })
}

fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port for etcd")?;
    Ok(listener.local_addr()?.port())
}

/// The hidden verb that becomes etcd.
#[derive(Debug, Args)]
pub struct EtcdArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true, required = true)]
    command: Vec<std::ffi::OsString>,
}

/// Asks the kernel to end this process with its parent, then becomes etcd. So no etcd outlives an `up` that was killed.
pub(crate) fn become_etcd(args: &EtcdArgs) -> anyhow::Result<crate::exit::Exit> {
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .context("cannot tie etcd's life to this process's")?;
    let (program, arguments) = args.command.split_first().context("no program")?;
    let error = std::process::Command::new(program).args(arguments).exec();
    Err(error).with_context(|| format!("cannot run {}", Path::new(program).display()))
}
