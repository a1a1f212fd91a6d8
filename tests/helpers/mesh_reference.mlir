// all_gather
mesh.mesh @mesh0(shape = 2x2)
func.func @f(%0: tensor<2x2xi8>) -> tensor<2x4xi8> {
  %1 = mesh.all_gather %0 on @mesh0 mesh_axes = [1] gather_axis = 1
    : tensor<2x2xi8> -> tensor<2x4xi8>
  return %1 : tensor<2x4xi8>
}
// -----
// all_reduce
mesh.mesh @mesh0(shape = 2x2)
func.func @f(%0: tensor<3x4xf32>) -> tensor<3x4xf64> {
  %1 = mesh.all_reduce %0 on @mesh0 mesh_axes = [1, 0] reduction = <max>
    : tensor<3x4xf32> -> tensor<3x4xf64>
  return %1 : tensor<3x4xf64>
}
// -----
// all_slice
mesh.mesh @mesh0(shape = 2x2)
func.func @f(%0: tensor<2x4xi8>) -> tensor<2x2xi8> {
  %1 = mesh.all_slice %0 on @mesh0 mesh_axes = [1] slice_axis = 1
    : tensor<2x4xi8> -> tensor<2x2xi8>
  return %1 : tensor<2x2xi8>
}
// -----
// all_to_all
mesh.mesh @mesh0(shape = 3)
func.func @f(%0: tensor<3x2xi8>) -> tensor<3x2xi8> {
  %1 = mesh.all_to_all %0 on @mesh0 mesh_axes = [0]
    split_axis = 0 concat_axis = 0
    : tensor<3x2xi8> -> tensor<3x2xi8>
  return %1 : tensor<3x2xi8>
}
// -----
// broadcast
mesh.mesh @mesh0(shape = 2x2)
func.func @f(%0: tensor<2xi8>) -> tensor<2xi8> {
  %1 = mesh.broadcast %0 on @mesh0
    mesh_axes = [0]
    root = [0]
    : (tensor<2xi8>) -> tensor<2xi8>
  return %1 : tensor<2xi8>
}
// -----
// gather
mesh.mesh @mesh0(shape = 2x2)
func.func @f(%0: tensor<2x2xi8>) -> tensor<2x4xi8> {
  %1 = mesh.gather %0 on @mesh0 mesh_axes = [1]
    gather_axis = 1 root = [1]
    : (tensor<2x2xi8>) -> tensor<2x4xi8>
  return %1 : tensor<2x4xi8>
}
// -----
// mesh
// A device mesh with 3 axes, the total device number is 4 * 8 * 12
// The dimension sizes are 4, 8, 12
mesh.mesh @mesh0(shape = 4x8x12)

// A device mesh with 2 axes, the total device number is unknown
// The first dimension size is 4 and the second is unknown
mesh.mesh @mesh1(shape = 4x?)

// A device mesh with 2 axes, the total device number is unknown
// The first dimension size is unknown and the second is 4
mesh.mesh @mesh2(shape = ?x4)

// A device mesh with 2 axes, the number of devices along both axes
// is unknown
mesh.mesh @mesh3(shape = ?x?)
// -----
// neighbors_linear_indices, with both of its results
mesh.mesh @mesh(shape = 10x20x30)
func.func @f() -> (index, index) {
  %c1 = arith.constant 1 : index
  %c2 = arith.constant 2 : index
  %c3 = arith.constant 3 : index
  %idx:2 = mesh.neighbors_linear_indices on @mesh[%c1, %c2, %c3] split_axes = [1] : index, index
  return %idx#0, %idx#1 : index, index
}
// -----
// process_linear_index
mesh.mesh @mesh(shape = 10x20x30)
func.func @f() -> index {
  %idx = mesh.process_linear_index on @mesh : index
  return %idx : index
}
// -----
// reduce, on a mesh that has the root
mesh.mesh @mesh0(shape = 4x3)
func.func @f(%0: tensor<3x4xf32>) -> tensor<3x4xf64> {
  %1 = mesh.reduce %0 on @mesh0 mesh_axes = [1, 0]
    reduction = <max> root = [2, 3]
    : (tensor<3x4xf32>) -> tensor<3x4xf64>
  return %1 : tensor<3x4xf64>
}
// -----
// reduce_scatter, of the shape in its figure
mesh.mesh @mesh0(shape = 2x2)
func.func @f(%0: tensor<2x2xf32>) -> tensor<1x2xf64> {
  %1 = mesh.reduce_scatter %0 on @mesh0 mesh_axes = [1]
    reduction = <max> scatter_axis = 0
    : tensor<2x2xf32> -> tensor<1x2xf64>
  return %1 : tensor<1x2xf64>
}
// -----
// scatter
mesh.mesh @mesh0(shape = 2x2)
func.func @f(%0: tensor<2x2xi8>) -> tensor<1x2xi8> {
  %1 = mesh.scatter %0 on @mesh0 mesh_axes = [0]
    scatter_axis = 0
    root = [1]
    : (tensor<2x2xi8>) -> tensor<1x2xi8>
  return %1 : tensor<1x2xi8>
}
// -----
// only_result_annotated
mesh.mesh @mesh0(shape = 2x2)
func.func @only_result_annotated(%arg0 : tensor<4x8xf32>) -> () {
  %sharding = mesh.sharding @mesh0 split_axes = [[0]] : !mesh.sharding
  %0 = mesh.shard %arg0 to %sharding : tensor<4x8xf32>
  return
}
// -----
// only_operand_annotated
mesh.mesh @mesh0(shape = 2x2)
func.func @only_operand_annotated(%arg0 : tensor<4x8xf32>) -> () {
  %sharding = mesh.sharding @mesh0 split_axes = [[0]] : !mesh.sharding
  %0 = mesh.shard %arg0 to %sharding annotate_for_users : tensor<4x8xf32>
  return
}
// -----
// two_operands_annotated
mesh.mesh @mesh0(shape = 2x2)
func.func @two_operands_annotated(%arg0 : tensor<4x8xf32>, %arg1 : tensor<16x8xf32>) -> () {
  %sharding = mesh.sharding @mesh0 split_axes = [[0]] : !mesh.sharding
  %0 = mesh.shard %arg0 to %sharding annotate_for_users : tensor<4x8xf32>
  %1 = mesh.shard %arg1 to %sharding annotate_for_users : tensor<16x8xf32>
  return
}
// -----
// both_result_and_multi_operands_annotated, on a mesh that has the axes
mesh.mesh @mesh0(shape = 2x2x2)
func.func @both_result_and_multi_operands_annotated(
    %arg0 : tensor<4x8xf32>) -> () {
  %sharding = mesh.sharding @mesh0 split_axes = [[0]] : !mesh.sharding
  %0 = mesh.shard %arg0 to %sharding : tensor<4x8xf32>
  %sharding1 = mesh.sharding @mesh0 split_axes = [[1]] : !mesh.sharding
  %1 = mesh.shard %0 to %sharding1 annotate_for_users : tensor<4x8xf32>
  %sharding2 = mesh.sharding @mesh0 split_axes = [[2]] : !mesh.sharding
  %2 = mesh.shard %0 to %sharding2 annotate_for_users : tensor<4x8xf32>
  stablehlo.custom_call @op0(%1) : (tensor<4x8xf32>) -> ()
  stablehlo.custom_call @op1(%2) : (tensor<4x8xf32>) -> ()
  return
}
// -----
// sharding, with the types that the form requires
mesh.mesh @mesh0(shape = 2x2x4)
mesh.mesh @mesh1d_4(shape = 4)
func.func @f(%arg0: tensor<4x8xf32>, %arg1: tensor<4x14xf32>, %arg2: tensor<4x8xf32>) {
  // The tensor is fully replicated on @mesh0.
  // Currently, there must be at least one sub-array present in axes, even
  // if it's empty. Otherwise, a parsing error will occur.
  %sharding0 = mesh.sharding @mesh0 split_axes = [[]] : !mesh.sharding

  // The tensor is sharded on the first dimension along axis 0 of @mesh0
  %sharding1 = mesh.sharding @mesh0 split_axes = [[0]] : !mesh.sharding

  // The tensor is sharded on its first dimension along axis 0 of @mesh0 and
  // it is also a partial_sum along mesh axis 1.
  %sharding2 = mesh.sharding @mesh0 split_axes = [[0], []] partial = sum[1] : !mesh.sharding

  // The tensor is sharded on its first dimension along axis 0 of @mesh0 and
  // it is also a partial_max along mesh axis 1.
  %sharding3 = mesh.sharding @mesh0 split_axes = [[0]] partial = max[1] : !mesh.sharding

  // Could be used for a mesh.shard op
  %sharded0 = mesh.shard %arg0 to %sharding3 : tensor<4x8xf32>

  // The tensor is sharded on its first dimension along axis 0 of @mesh0 and
  // and it has halo-sizes of 1 and 2 on the sharded dim.
  %halo_sharding = mesh.sharding @mesh0 split_axes = [[0]] halo_sizes = [1, 2] : !mesh.sharding
  %sharded1 = mesh.shard %arg2 to %halo_sharding : tensor<4x8xf32>

  // The tensor is sharded on its second dimension along axis 0 of @mesh1d_4
  // and it has pre-defined shard sizes. The shards of the devices will have
  // the following shapes: [4x2, 4x3, 4x4, 4x5]
  %sharding4 = mesh.sharding @mesh1d_4 split_axes = [[], [0]] sharded_dims_offsets = [0, 2, 5, 9, 14] : !mesh.sharding
  %sharded2 = mesh.shard %arg1 to %sharding4 : tensor<4x14xf32>
  return
}
// -----
// sharded_dims_offsets
mesh.mesh @mesh0(shape = 2x2)
func.func @f(%arg0: tensor<32x32x32xf32>) {
  %s = mesh.sharding @mesh0 split_axes = [[0], [1]] sharded_dims_offsets = [0, 24, 32, 0, 20, 32] : !mesh.sharding
  %0 = mesh.shard %arg0 to %s : tensor<32x32x32xf32>
  return
}
// -----
// shift, with its operand
mesh.mesh @mesh0(shape = 2x4)
func.func @f(%0: tensor<2xi8>) -> tensor<2xi8> {
  %1 = mesh.shift %0 on @mesh0 mesh_axes = [1]
    shift_axis = 1 offset = 2 rotate
    : tensor<2xi8> -> tensor<2xi8>
  return %1 : tensor<2xi8>
}
