//! What the interpreter does not know, it refuses by name and line.

use ptx_vm::{Module, ParseError, Refusal};

use crate::fixture::{HEADER, kernel};

#[track_caller]
fn refusal_of(text: &str) -> ParseError {
    match Module::parse(&format!("{HEADER}{text}")) {
        Ok(_) => panic!("not refused: {text}"),
        Err(error) => error,
    }
}

#[test]
fn an_unknown_opcode_is_named_with_its_line() {
    let error = refusal_of(".visible .entry k()\n{\n.reg .b32 %r<2>;\nmov.u32 %r0, 1;\nactivemask.b32 %r1;\nret;\n}");
    assert_eq!(error.refusal, Refusal::Opcode("activemask".to_owned()));
    assert_eq!((error.line, error.statement.as_str()), (8, "activemask.b32 %r1"));
    assert!(
        error.to_string().contains("line 8") && error.to_string().contains("activemask"),
        "{error}"
    );
}

#[test]
fn nothing_is_left_out_silently() {
    let instructions = [
        "add.rz.f32 %f1, %f2, %f3;",
        "add.sat.s32 %r1, %r2, %r3;",
        "fma.rn.relu.bf16x2 %r1, %r2, %r3, %r4;",
        "mul.s32 %r1, %r2, %r3;",
        "mad.lo.cc.u32 %r1, %r2, %r3, %r4;",
        "cvt.f32.s32 %f1, %r1;",
        "cvt.rz.f32.f64 %f1, %rd1;",
        "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;",
        "cvt.s32.f32 %r1, %f1;",
        "ld.relaxed.gpu.global.u32 %r1, [%rd1];",
        "ld.acquire.gpu.global.u32 %r1, [%rd1];",
        "ld.shared.nc.u32 %r1, [%rd1];",
        "ld.global.v4.u64 {%rd1, %rd2, %rd3, %rd4}, [%rd5];",
        "ld.global.L2::cache_hint.u32 %r1, [%rd1], %rd2;",
        "ld.global.v2.u32 {%r1}, [%rd1];",
        "st.param.u32 [k_param_0], %r1;",
        "bar.sync 1;",
        "bar.sync 0, 64;",
        "bar.red.popc.u32 %r1, 0, %p1;",
        "bar.sync %r1;",
        "mov.u32 %r1, %clock;",
        "mov.u32 %r1, %r99;",
        "mov.u32 %r1, 1.5;",
        "atom.global.inc.u32 %r1, [%rd1], 5;",
        "atom.global.add.noftz.f16x2 %r1, [%rd1], %r2;",
        "cp.async.cg.shared.global [%r1], [%rd1], 8;",
        "cp.async.ca.shared.global [%r1], [%rd1], 16, %p1;",
        "cp.async.bulk.commit_group;",
        "cp.async.mbarrier.arrive.shared.b64 [%r1];",
        "mbarrier.init.shared.b64 [%r1], 5;",
        "wgmma.fence.sync.aligned;",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1, %r2}, {%r5, %r6}, {%r9, %r10}, {%r1, %r2};",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1, %r2}, {%r5, %r6, %r7, %r8}, {%r9, %r10}, {%r1, %r2};",
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [%r2];",
        "shfl.bfly.b32 %r1, %r2, 1, 31;",
        "prmt.b32.f4e %r1, %r2, %r3, %r4;",
        "lop3.or.b32 %r1|%p1, %r2, %r3, %r4, 0x11, %p2;",
        "nanosleep.u32 100;",
        "bra $NOWHERE;",
        "brx.idx %r1, $NOWHERE;",
        "ret",
        "}",
        ".callprototype x;",
        ".reg .b32 %x<99999999>;",
    ];
    for instruction in instructions {
        refusal_of(&kernel(1, instruction));
    }
}

#[test]
fn a_call_is_refused_by_the_name_of_what_it_calls() {
    let body = "{\n.param .b64 param0;\nst.param.b64 [param0], %rd1;\n.param .b32 retval0;\n\
                call.uni (retval0),\nvprintf,\n(param0, param1);\nld.param.b32 %r1, [retval0];\n}";
    assert_eq!(
        refusal_of(&kernel(1, body)).refusal,
        Refusal::Call("vprintf".to_owned())
    );
    assert_eq!(
        refusal_of(&kernel(1, "call.uni __assertfail, (p0);")).refusal,
        Refusal::Call("__assertfail".to_owned())
    );
    assert_eq!(
        refusal_of(&kernel(1, "@%p1 call f;")).refusal,
        Refusal::Call("f".to_owned())
    );
}

#[test]
fn directives_that_change_a_launch_are_refused() {
    for text in [
        ".visible .entry k()\n.explicitcluster\n{\nret;\n}",
        ".visible .entry k()\n.maxntid x\n{\nret;\n}",
        ".visible .entry k(.reg .u32 n)\n{\nret;\n}",
        ".visible .entry k()\n{\nret;\n",
        ".extern .global .u32 elsewhere;",
        ".global .texref t;",
        ".tex .u32 t;",
        "ret;",
    ] {
        refusal_of(text);
    }
}

#[test]
fn what_says_nothing_of_a_run_is_passed_over() {
    let text = ".extern .func (.param .b32 func_retval0) vprintf\n(\n.param .b64 a\n)\n;\n\
                .visible .func (.param .b32 r) f(.param .b32 a)\n{\n.reg .b32 %r<2>;\ncall.uni g;\nret;\n}\n\
                .weak .entry k(\n)\n.maxntid 128, 1, 1\n.minnctapersm 2\n{\n.pragma \"nounroll\";\n.loc 1 5 3\n\
                // a comment; with { braces\nmembar.gl;\nfence.acq_rel.gpu;\nexit;\n}\n\
                .file 1 \"/a/b.cu\"\n.section .debug_str\n{\n$L: .b8 1, 2\n}\n";
    let module = Module::parse(&format!("{HEADER}{text}")).unwrap();
    assert_eq!(module.names().collect::<Vec<_>>(), ["k"]);
    let kernel = module.kernel("k").unwrap();
    assert_eq!(
        (kernel.max_threads, kernel.param_bytes, kernel.static_shared_bytes),
        (Some(128), 0, 0)
    );
    assert!(module.kernel("f").is_none());
}
