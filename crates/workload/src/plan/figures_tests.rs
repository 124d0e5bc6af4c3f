//! Every figure of rows 4, 10, 12 and 26 to 32 of the design's BENCH page, and of row 57, with the corrections of its
//! section 1.0.

use super::capacity::{CEILINGS, Rounding, by_rate_each, ceiling, instances, replicas, tightness};
use super::concurrency::{Point, scale_point};
use super::cost::{bill, difference};
use super::decode::{DecodeStep, bound};
use super::prefill::{Device, Prompt, memory_fit, operations, time};
use super::queueing::{Load, in_system, slowdown_alone};

/// The load of the source: 1,000 requests a second of 40 ms each.
const LOAD: Load = Load {
    rate: 1000.0,
    service_s: 0.040,
};
const SLO_MS: f64 = 400.0;

fn to(value: f64, decimals: i32) -> f64 {
    let scale = 10_f64.powi(decimals);
    (value * scale).round() / scale
}

#[test]
fn row_4_replicas() {
    let replicas = replicas(200.0, 64.0, 4.0).unwrap();
    assert_eq!((replicas.rate_each, replicas.needed), (16.0, 13));
}

#[test]
fn row_26_interference_and_row_27_where_to_add_servers() {
    let points = [(8, 45, 90), (16, 52, 160), (32, 68, 280), (64, 95, 480)].map(|(concurrency, p50, p99)| Point {
        concurrency,
        p50_ms: f64::from(p50),
        p99_ms: f64::from(p99),
    });
    let found = scale_point(&points, 300.0).unwrap();
    let ratios: Vec<f64> = found.ratios.iter().map(|ratio| to(*ratio, 1)).collect();
    assert_eq!(ratios, [2.0, 3.1, 4.1, 5.1]);
    assert_eq!(found.highest_good, Some(32));
    assert_eq!(found.add_at, Some((24, 28)));
    assert!(found.is_edge_seen);
}

#[test]
fn row_28_littles_law() {
    assert_eq!(in_system(1000.0, 0.040), Ok(40.0));
    assert!(in_system(0.0, 0.040).is_err() && in_system(1000.0, f64::NAN).is_err());
}

#[test]
fn row_29_ceilings() {
    assert_eq!(CEILINGS, [(200, 0.55), (300, 0.63), (400, 0.70), (500, 0.75)]);
    assert_eq!(
        [200.0, 300.0, 400.0, 500.0].map(|slo| ceiling(slo).unwrap()),
        [0.55, 0.63, 0.70, 0.75]
    );
}

#[test]
fn row_30_instances_and_their_true_utilisation() {
    let sized = instances(LOAD, ceiling(SLO_MS).unwrap(), Rounding::Tens).unwrap();
    assert_eq!((sized.needed.count, sized.planned.count), (58, 60));
    // The source says about 68 %.
    assert_eq!(to(sized.needed.utilisation * 100.0, 1), 69.0);
    assert_eq!(to(sized.planned.utilisation * 100.0, 1), 66.7);
    // The H200's 27 requests a second are a measurement and come from no formula.
    let h200 = by_rate_each(1000.0, 27.0, Rounding::Tens).unwrap();
    assert_eq!((h200.needed, h200.planned), (38, 40));
}

#[test]
fn row_30_the_waits_of_60_queues_and_of_one_queue() {
    let planned = instances(LOAD, 0.70, Rounding::Tens).unwrap().planned;
    // 60 M/M/1 queues at two thirds: twice the service time.
    assert_eq!(to(planned.alone.mean_s * 1e3, 6), 80.0);
    // 120 ms x ln(66.7).
    assert_eq!(to(planned.alone.p99_s * 1e3, 1), 504.0);
    // One queue: computed apart from this code in Python, by the sum in Erlang's definition (C = 0.0020356).
    assert_eq!(to(planned.pooled.share_waiting, 6), 0.002_036);
    assert_eq!(to(planned.pooled.mean_s * 1e3, 6), 0.004_071);
    assert_eq!(planned.pooled.p99_s, 0.0);
}

#[test]
fn row_30_tightness() {
    let rows = tightness(LOAD, SLO_MS, Rounding::Tens).unwrap();
    let planned: Vec<u32> = rows.iter().map(|row| row.planned.count).collect();
    assert_eq!(planned, [73, 64, 60, 54]);
    let needed: Vec<u32> = rows.iter().map(|row| row.needed).collect();
    assert_eq!(needed, [73, 64, 58, 54], "only the chosen row is rounded up");
    let chosen: Vec<u32> = rows.iter().filter(|row| row.is_chosen).map(|row| row.slo_ms).collect();
    assert_eq!(chosen, [400]);
}

#[test]
fn row_30_the_tail_at_eight_tenths() {
    // The source says 5 times.
    assert_eq!(to(slowdown_alone(0.8).unwrap() / slowdown_alone(0.2).unwrap(), 9), 4.0);
}

#[test]
fn row_31_dollars() {
    let month = |count, price| to(bill(count, price).unwrap().per_month, 0);
    assert_eq!(month(60, 1.69), 73_008.0);
    assert_eq!(month(40, 1.89), 54_432.0);
    let rows = tightness(LOAD, SLO_MS, Rounding::Tens).unwrap();
    let months: Vec<f64> = rows.iter().map(|row| month(row.planned.count, 1.69)).collect();
    assert_eq!(months, [88_826.0, 77_875.0, 73_008.0, 65_707.0]);
    let cheaper = difference(bill(60, 1.69).unwrap(), bill(40, 1.89).unwrap());
    assert_eq!(to(cheaper * 100.0, 0), -25.0);
    let hour = |count| to(bill(count, 1.69).unwrap().per_hour, 2);
    assert_eq!((hour(60), hour(14)), (101.40, 23.66));
}

#[test]
fn row_32_prefill_and_the_two_peaks() {
    let prompt = Prompt {
        parameters: 70e9,
        tokens: 512.0,
        attention: None,
    };
    let operations = operations(prompt).unwrap();
    assert_eq!(to(operations.tflop(), 1), 71.7);
    let device = Device {
        dense_tflops: 3958.0 / 2.0,
        mfu: 0.5,
    };
    let time = time(operations, device).unwrap();
    assert_eq!(to(time.at_sparse_peak_s * 1e3, 0), 36.0);
    assert_eq!(to(time.dense_s * 1e3, 0), 72.0);
    // The source plans with 40 ms: a tenth on top. The same tenth makes the true time 80 ms.
    assert_eq!(to(time.at_sparse_peak_s * 1.1e3, 0), 40.0);
    assert_eq!(to(time.dense_s * 1.1e3, 0), 80.0);
    let fit = memory_fit(70.0, 80.0).unwrap();
    assert_eq!(fit.free_gb, 10.0);
}

#[test]
fn row_57_decode() {
    let step = DecodeStep {
        weights_bytes: 8e9 * 2.0,
        bandwidth: 600e9,
        batch: 1.0,
        kv_bytes_each: 0.0,
    };
    let bound = bound(step).unwrap();
    assert_eq!(bound.tokens_each, 37.5);
    assert_eq!(to(bound.step_s * 1e3, 0), 27.0);
}
