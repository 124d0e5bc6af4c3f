//! Prints docs/reference/metrics.md as the tables of metrics have it.

fn main() {
    print!("{}", service_runtime::metrics::docs::page());
}
