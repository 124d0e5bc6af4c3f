//! CPU and memory of processes of this machine, from `/proc`: the client's own beside the server's.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use workload::record::Usage;

/// `/proc/PID/stat` counts in ticks of 10 ms on every architecture of Linux (`USER_HZ`).
const TICK: Duration = Duration::from_millis(10);
/// A server has fewer processes. The limit keeps a sample cheap.
const PROCESSES_MAX: usize = 64;

/// Now on the clock that all processes of this machine share.
pub(super) fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// CPU time of one process since its start, and its memory now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Reading {
    cpu: Duration,
    memory_bytes: u64,
}

/// Reads the same processes several times during a run.
#[derive(Debug)]
pub(super) struct Processes {
    pids: BTreeMap<String, u32>,
    /// Time of the run, and what each process had used by then.
    samples: Vec<(Duration, BTreeMap<String, Reading>)>,
}

impl Processes {
    pub(super) fn new(pids: BTreeMap<String, u32>) -> Self {
        Self {
            pids: pids.into_iter().take(PROCESSES_MAX).collect(),
            samples: Vec::new(),
        }
    }

    /// One process that used a whole core for so long.
    #[cfg(test)]
    pub(super) fn always_busy(name: &str, time: Duration) -> Self {
        let reading = |cpu| Reading { cpu, memory_bytes: 1 };
        let sample = |at| (at, BTreeMap::from([(name.to_owned(), reading(at))]));
        Self {
            pids: BTreeMap::from([(name.to_owned(), 1)]),
            samples: vec![sample(Duration::ZERO), sample(time)],
        }
    }

    pub(super) fn sample(&mut self, now: Duration) {
        let readings = self.pids.iter();
        let readings = readings.filter_map(|(name, pid)| Some((name.clone(), reading(*pid)?)));
        self.samples.push((now, readings.collect()));
    }

    /// What each process used between two times of the run. Between two samples the CPU time is taken to grow evenly.
    pub(super) fn used(&self, from: Duration, to: Duration) -> BTreeMap<String, Usage> {
        let usage = |name: &String| {
            let points: Vec<(Duration, Reading)> = self
                .samples
                .iter()
                .filter_map(|(at, readings)| Some((*at, *readings.get(name)?)))
                .collect();
            let cpu = cpu_at(&points, to)?.saturating_sub(cpu_at(&points, from)?);
            let within = points.iter().filter(|(at, _)| (from..=to).contains(at));
            let memory = within.map(|(_, reading)| reading.memory_bytes).max();
            let last = points.last().map_or(0, |(_, reading)| reading.memory_bytes);
            Some(Usage {
                cpu,
                memory_bytes_max: memory.unwrap_or(last),
            })
        };
        let names = self.pids.keys();
        names.filter_map(|name| Some((name.clone(), usage(name)?))).collect()
    }
}

fn cpu_at(points: &[(Duration, Reading)], time: Duration) -> Option<Duration> {
    let after = points.iter().position(|(at, _)| *at >= time);
    let Some(after) = after else {
        return points.last().map(|(_, reading)| reading.cpu);
    };
    let (to, next) = points[after];
    let Some((from, before)) = after.checked_sub(1).map(|at| points[at]) else {
        return Some(next.cpu);
    };
    let share = (time - from).as_secs_f64() / (to - from).as_secs_f64().max(f64::MIN_POSITIVE);
    Some(before.cpu + next.cpu.saturating_sub(before.cpu).mul_f64(share.clamp(0.0, 1.0)))
}

/// `None`: the process has ended.
fn reading(pid: u32) -> Option<Reading> {
    let fields = stat(pid)?;
    let field = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok());
    // proc(5) counts from 1; the first field here is the third one, the state.
    let (user, system) = (field(11)?, field(12)?);
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let memory = memory.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    Some(Reading {
        cpu: TICK * u32::try_from(user + system).unwrap_or(u32::MAX),
        memory_bytes: memory.unwrap_or(0) << 10,
    })
}

/// The fields of `/proc/PID/stat` behind the process's name, which may hold blanks.
fn stat(pid: u32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = text.rsplit_once(") ")?;
    Some(fields.split_whitespace().map(str::to_owned).collect())
}

/// The processes of the server that listens on `address`: the listener, what it started, and, for a process of baton, what
/// was started beside it. Empty when the server is not on this machine, or when its owner is somebody else.
pub(super) fn of_listener(address: SocketAddr) -> BTreeMap<String, u32> {
    let Some(listener) = listener(address) else {
        return BTreeMap::new();
    };
    let parents = parents();
    let mut roots = vec![listener];
    let parent = parents.get(&listener).copied();
    roots.extend(parent.filter(|parent| command(*parent).is_some_and(|words| is_baton_up(&words))));
    // Whoever else started the coordinator, as a test does, started the nodes, too. Process 1 starts everything.
    let parent = parent.filter(|parent| *parent != 1 && is_node(listener));
    let siblings = parents.iter().filter(|(_, other)| Some(**other) == parent);
    roots.extend(siblings.map(|(pid, _)| *pid).filter(|pid| is_node(*pid)));
    let mut family: BTreeSet<u32> = roots.iter().copied().collect();
    // Each round adds one more generation.
    while family.len() < PROCESSES_MAX {
        let children = parents
            .iter()
            .filter(|(pid, parent)| family.contains(parent) && !family.contains(pid));
        let children: Vec<u32> = children.map(|(pid, _)| *pid).collect();
        if children.is_empty() {
            break;
        }
        family.extend(children);
    }
    family.remove(&std::process::id());
    let mut named = BTreeMap::new();
    for pid in family {
        let name = name(pid);
        let is_free = !named.contains_key(&name);
        named.insert(if is_free { name } else { format!("{name}-{pid}") }, pid);
    }
    named
}

fn is_baton_up(words: &[String]) -> bool {
    let program = words.first().and_then(|word| Path::new(word).file_name());
    program.is_some_and(|name| name == "baton") && words.iter().any(|word| word == "up")
}

/// A coordinator or a node, as `baton up` starts it.
fn is_node(pid: u32) -> bool {
    command(pid).is_some_and(|words| words.get(1).is_some_and(|verb| verb.starts_with("serve-")))
}

/// A node of baton says its name with `--name=`. Others have the name of their program.
fn name(pid: u32) -> String {
    let words = command(pid).unwrap_or_default();
    let own = words.iter().find_map(|word| word.strip_prefix("--name="));
    let program = || {
        let path = Path::new(words.first()?);
        Some(path.file_name()?.to_string_lossy().into_owned())
    };
    let up = is_baton_up(&words).then(|| "baton up".to_owned());
    let name = own.map(str::to_owned).or(up).or_else(program);
    name.unwrap_or_else(|| format!("pid {pid}"))
}

/// The words that a process was started with.
pub(crate) fn command(pid: u32) -> Option<Vec<String>> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    Some(words.map(|word| String::from_utf8_lossy(word).into_owned()).collect())
}

fn all_pids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn parents() -> BTreeMap<u32, u32> {
    let parent = |pid: u32| stat(pid)?.get(1)?.parse().ok();
    all_pids().filter_map(|pid| Some((pid, parent(pid)?))).collect()
}

/// The process that holds the socket which listens on the address's port.
pub(crate) fn listener(address: SocketAddr) -> Option<u32> {
    let inode = ["/proc/net/tcp", "/proc/net/tcp6"]
        .into_iter()
        .filter_map(|table| fs::read_to_string(table).ok())
        .find_map(|table| listening_inode(&table, address.port()))?;
    // A server elsewhere may have the port of one here. Only an address of this machine can be bound.
    let is_here = address.ip().is_loopback() || std::net::UdpSocket::bind((address.ip(), 0)).is_ok();
    let socket = format!("socket:[{inode}]");
    let holds = |pid: &u32| {
        let links = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        links
            .filter_map(|link| fs::read_link(link.path()).ok())
            .any(|target| target.as_os_str() == socket.as_str())
    };
    all_pids().find(holds).filter(|_| is_here)
}

/// In proc(5)'s table: local address in column 2, state in 4 (`0A` listens), inode in 10.
fn listening_inode(table: &str, port: u16) -> Option<u64> {
    table.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (_, local_port) = fields.get(1)?.rsplit_once(':')?;
        let is_ours = u16::from_str_radix(local_port, 16) == Ok(port) && *fields.get(3)? == "0A";
        is_ours.then(|| fields.get(9)?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_between_two_samples_grows_evenly() {
        let reading = |cpu| Reading {
            cpu: Duration::from_millis(cpu),
            memory_bytes: cpu,
        };
        let at = Duration::from_millis;
        let mut processes = Processes::new(BTreeMap::from([("a".to_owned(), 1)]));
        for (time, cpu) in [(0, 100), (1000, 300), (2000, 1300)] {
            processes
                .samples
                .push((at(time), BTreeMap::from([("a".to_owned(), reading(cpu))])));
        }
        let used = |from, to| processes.used(at(from), at(to))["a"];
        assert_eq!(used(0, 2000).cpu, at(1200));
        assert_eq!(used(500, 1500).cpu, at(600));
        assert_eq!((used(1500, 9000).cpu, used(900, 1100).memory_bytes_max), (at(500), 300));
    }

    #[test]
    fn the_process_that_listens_is_found_by_its_port() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = socket.local_addr().expect("bound");
        assert_eq!(listener(address), Some(std::process::id()));
        drop(socket);
        assert_eq!(listener(address), None);
    }

    #[test]
    fn this_process_can_be_read() {
        let own = reading(std::process::id()).expect("we live");
        assert!(own.memory_bytes > 1 << 20, "{own:?}");
        assert!(reading(u32::MAX).is_none());
    }
}
