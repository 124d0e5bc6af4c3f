//! The table and the JSON object of a measurement.

use std::io::Write as _;
use std::time::Duration;

use serde::Serialize;
use workload::statistics::Samples;

use super::Way;
use super::memory::Payload;
use crate::observe::table::Table;
use crate::terminal::Terminal;

/// The measurements of one way.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub way: Way,
    bytes: u64,
    pub took: Vec<Duration>,
}

impl Row {
    pub fn new(way: Way, bytes: u64) -> Self {
        Self {
            way,
            bytes,
            took: Vec::new(),
        }
    }

    /// So many percent of the rounds took at most this long.
    fn percentile(&self, percent: f64) -> Duration {
        let seconds = Samples::new(self.took.iter().map(Duration::as_secs_f64));
        seconds
            .percentile(percent)
            .map_or(Duration::ZERO, Duration::from_secs_f64)
    }

    /// The median over the rounds of this way's rate, as a share of another way's rate in the same round.
    fn share_of(&self, yardstick: &Row) -> f64 {
        let rounds = self.took.iter().zip(&yardstick.took);
        let shares = rounds.map(|(took, of)| of.as_secs_f64() / took.as_secs_f64().max(1e-9));
        Samples::new(shares).percentile(50.0).unwrap_or(0.0)
    }

    fn rate(&self, took: Duration) -> f64 {
        self.bytes as f64 / took.as_secs_f64().max(1e-9)
    }
}

#[derive(Debug, Serialize)]
struct Measured {
    way: &'static str,
    rounds: usize,
    /// The count over all rounds, including the first one that does not count.
    bytes_moved: u64,
    milliseconds_median: f64,
    gigabytes_per_second_median: f64,
    gigabytes_per_second_slow_tenth: f64,
    gigabytes_per_second_fast_tenth: f64,
    /// The share of the yardstick. For shared memory it is the median of the ratios to the memcpy of the same round, for
    /// TCP the ratio of the median to iperf3's median.
    share_of_yardstick: f64,
    limit: &'static str,
}

#[derive(Debug, Serialize)]
pub(super) struct Report {
    bytes: u64,
    blocks: u32,
    block_bytes: usize,
    rounds: u32,
    cores: usize,
    rows: Vec<Measured>,
    /// The result of one stream of iperf3, or null.
    iperf3_gigabytes_per_second: Option<f64>,
    /// The yardstick of grpc.
    tcp_yardstick: String,
}

impl Report {
    pub fn new(payload: Payload, (rounds, rows): (u32, Vec<Row>), iperf3: Result<(f64, usize), String>) -> Self {
        let row_of = |way| rows.iter().find(|row| row.way == way);
        let tcp_rate = iperf3.as_ref().ok().map(|(rate, _)| *rate);
        let measured = |row: &Row| {
            let median = row.percentile(50.0);
            let is_tcp = matches!(row.way, Way::Grpc | Way::GrpcTls | Way::TcpStream);
            let share = match (is_tcp, tcp_rate) {
                (true, Some(tcp)) => row.rate(median) / tcp.max(1.0),
                (true, None) => row_of(Way::TcpStream).map_or(0.0, |yardstick| row.share_of(yardstick)),
                (false, _) => row_of(Way::Memcpy).map_or(0.0, |yardstick| row.share_of(yardstick)),
            };
            Measured {
                way: row.way.name(),
                rounds: row.took.len(),
                // Each round has moved the whole payload: `measure` refuses any other count.
                bytes_moved: row.bytes * (row.took.len() as u64 + 1),
                milliseconds_median: median.as_secs_f64() * 1e3,
                gigabytes_per_second_median: row.rate(median) / 1e9,
                gigabytes_per_second_slow_tenth: row.rate(row.percentile(90.0)) / 1e9,
                gigabytes_per_second_fast_tenth: row.rate(row.percentile(10.0)) / 1e9,
                share_of_yardstick: share,
                limit: row.way.limit(),
            }
        };
        Self {
            bytes: payload.bytes(),
            blocks: payload.blocks,
            block_bytes: payload.geometry().block_bytes(),
            rounds,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            rows: rows.iter().map(measured).collect(),
            iperf3_gigabytes_per_second: tcp_rate.map(|rate| rate / 1e9),
            tcp_yardstick: match iperf3 {
                Ok((_, runs)) => format!("one stream of iperf3, median of {runs} x 1 s between the rounds"),
                Err(failed) => format!("{failed}; our own single TCP stream"),
            },
        }
    }

    pub fn print(&self, is_json: bool) -> anyhow::Result<()> {
        let mut out = crate::stdout::stdout();
        if is_json {
            writeln!(out, "{}", serde_json::to_string(self)?)?;
            return Ok(());
        }
        writeln!(
            out,
            "{} blocks of {} bytes ({:.1} MB) between two processes, {} rounds in turn, first block to acknowledgement, medians, {} cores",
            self.blocks,
            self.block_bytes,
            self.bytes as f64 / 1e6,
            self.rounds,
            self.cores
        )?;
        let mut table = Table::new(&["way", ">ms", ">GB/s", ">10%..90% GB/s", ">of yardstick", "limit"]);
        for row in &self.rows {
            let (slow, fast) = (row.gigabytes_per_second_slow_tenth, row.gigabytes_per_second_fast_tenth);
            table.row(vec![
                row.way.into(),
                format!("{:.2}", row.milliseconds_median).into(),
                format!("{:.2}", row.gigabytes_per_second_median).into(),
                format!("{slow:.2}..{fast:.2}").into(),
                format!("{:.0} %", row.share_of_yardstick * 100.0).into(),
                row.limit.into(),
            ]);
        }
        if let Some(rate) = self.iperf3_gigabytes_per_second {
            table.row(vec![
                "iperf3, one stream".into(),
                "".into(),
                format!("{rate:.2}").into(),
            ]);
        }
        out.write_all(table.render(Terminal::plain()).as_bytes())?;
        writeln!(
            out,
            "yardsticks: shm, the two-process memcpy (one thread copies every block into the other's memory, a byte there and \
             back); grpc, {}",
            self.tcp_yardstick
        )?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_of_rounds_is_between_the_two_in_the_middle() {
        let mut row = Row::new(Way::Grpc, 1_000);
        row.took = [40, 10, 30, 20].map(Duration::from_millis).to_vec();
        let at = |percent| row.percentile(percent);
        assert_eq!([0.0, 50.0, 100.0].map(at), [10, 25, 40].map(Duration::from_millis));
    }
}
